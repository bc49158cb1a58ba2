"""Named settings: the paper's experiments as their authors ran them, and recipes of our own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gcnn.train import Config

__all__ = ["RECIPES"]

# the authors turned training digits by up to 3.14 degrees (they meant radians), and estimated norms with dropout on
_PAPER = Config(data="rotated_mnist", batch_size=128, lr=1e-3, rotate=3.14, reestimate="train", test_every=100)
_OURS = Config(data="rotated_mnist", schedule="cosine", test_every=100)

# table 2 of the paper: network -> group -> its size
_NETWORKS: dict[str, dict[str, dict[str, Any]]] = {
    "allcnn-c": {"p1": {"channels": 96}, "p4": {"channels": 48}, "p4m": {"channels": 32}},
    "resnet44": {"p1": {"widths": (32, 64, 128)}, "p4": {"widths": (16, 32, 64)}, "p4m": {"widths": (11, 23, 45)}},
    "resnet26": {"p1": {"widths": (71, 142, 284)}, "p4m": {"widths": (25, 50, 100)}},
}
_SGD = Config(data="whitened_cifar10", optimizer="sgd", weight_decay=1e-3, amp=True, reestimate="no", test_every=1000)
_RESNET = replace(_SGD, epochs=300, lr=0.05, drops=(50, 100, 150))
_ALLCNN = replace(_SGD, epochs=350, lr=0.05, drops=(200, 250, 300))
_FAST = replace(_SGD, schedule="linear", warmup=5, label_smoothing=0.1)
_FAST_RESNET = replace(_FAST, data="cifar10", epochs=24, batch_size=500, lr=0.4)
_FAST_ALLCNN = replace(_FAST, epochs=80, batch_size=250, lr=0.2, sharpness=0.1)
# network -> what was chosen for it on held-out images, without and with augmentation
_CHOSEN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "allcnn-c": ({}, {}),
    "resnet44": (
        {"sharpness": 0.2, "sharp_epochs": 8},
        {"epochs": 60, "weight_decay": 5e-4, "sharpness": 0.2, "sharp_epochs": 20},
    ),
    "resnet26": ({}, {"epochs": 30, "weight_decay": 5e-4}),
}


def _cifar10() -> dict[str, Config]:
    """kind/network-group for plain CIFAR-10, with a "+" for the paper's augmentation: a flip, and a shift of up to 2 pixels."""
    found = {}
    for name, groups in _NETWORKS.items():
        flat = name == "allcnn-c"
        for kind, base in (("paper", _ALLCNN if flat else _RESNET), ("fast", _FAST_ALLCNN if flat else _FAST_RESNET)):
            ours, ours_plus = _CHOSEN[name] if kind == "fast" else ({}, {})
            for group, sizes in groups.items():
                plain = replace(base, model=name, group=group, **sizes)
                found[f"{kind}/{name}-{group}"] = replace(plain, **ours)
                found[f"{kind}/{name}-{group}+"] = replace(plain, flip=True, shift=2, **ours_plus)
    return found


_HEXAGONS = {"p1": (15, 31, 62), "p6": (7, 14, 28), "p6m": (5, 10, 20)}
_VOLUMES = {"C1": (29, 59, 118), "D4": (10, 21, 42), "O": (6, 12, 24), "Oh": (4, 9, 17)}
_VOXELS = Config(
    model="voxel-resnet",
    data="volumes",
    optimizer="adam",
    epochs=30,
    batch_size=32,
    lr=2e-3,
    schedule="cosine",
    weight_decay=0.05,
    label_smoothing=0.1,
    reestimate="no",
    test_every=1000,
    amp=True,
)

RECIPES: dict[str, Config] = {
    # table 1 of the paper: Adam at a constant rate, batch norms estimated anew before the test
    "paper/z2cnn": replace(_PAPER, model="z2cnn", epochs=300),
    "paper/p4cnn": replace(_PAPER, model="p4cnn", epochs=100),
    "paper/p4cnn-rotpool": replace(_PAPER, model="p4cnn-rotpool", epochs=100),
    # the same 24,680 parameters, without augmentation, with a learning rate that falls
    "decay/p4cnn": replace(_OURS, model="p4cnn", epochs=200, lr=0.01, weight_decay=0.1, dropout=0.1),
    # as good as we can
    "best/p4": replace(
        _OURS,
        model="digit-resnet",
        group="p4",
        widths=(24, 48, 96),
        epochs=140,
        lr=4e-3,
        weight_decay=0.05,
        label_smoothing=0.1,
        dropout=0.3,
        rotate=180.0,
        test_turns=4,
        amp=True,
        compile=True,
    ),
    # the digits that come with the package, in minutes on a laptop
    "demo/z2cnn": Config(model="z2cnn", epochs=6, schedule="cosine", lr=1e-2, test_every=6),
    "demo/p4cnn": Config(model="p4cnn", epochs=6, schedule="cosine", lr=8e-3, test_every=6),
    # table 2, and the paper's future work: hexagons and volumes, each group with the same number of parameters
    **_cifar10(),
    **{f"hexagons/{g}": replace(_FAST_RESNET, model="hex-resnet26", group=g, widths=w, epochs=30) for g, w in _HEXAGONS.items()},
    **{f"volumes/{g}": replace(_VOXELS, group=g, widths=w) for g, w in _VOLUMES.items()},
}
"""Name -> config. A config file or options on the command line change single settings of a recipe."""
