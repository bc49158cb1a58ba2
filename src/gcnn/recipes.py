"""Named settings: the paper's experiments as their authors ran them, and recipes of our own."""

from __future__ import annotations

from dataclasses import replace

from gcnn.train import Config

__all__ = ["RECIPES"]

# the authors turned training digits by up to 3.14 degrees (they meant radians), and estimated norms with dropout on
_PAPER = Config(data="rotated_mnist", batch_size=128, lr=1e-3, rotate=3.14, reestimate="train", test_every=100)
_OURS = Config(data="rotated_mnist", schedule="cosine", test_every=100)

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
        epochs=60,
        lr=4e-3,
        weight_decay=0.05,
        label_smoothing=0.1,
        dropout=0.2,
        rotate=180.0,
        test_turns=4,
        amp=True,
        compile=True,
    ),
    # the digits that come with the package, in minutes on a laptop
    "demo/z2cnn": Config(model="z2cnn", epochs=6, schedule="cosine", lr=1e-2, test_every=6),
    "demo/p4cnn": Config(model="p4cnn", epochs=6, schedule="cosine", lr=8e-3, test_every=6),
}
"""Name -> config. A config file or options on the command line change single settings of a recipe."""
