"""Named settings: the paper's experiments as their authors ran them, and recipes of our own."""

from __future__ import annotations

from gcnn.train import Config

__all__ = ["RECIPES"]

_PAPER = Config(data="rotated_mnist", batch_size=128, lr=1e-3, test_every=100)

RECIPES: dict[str, Config] = {
    # table 1 of the paper: Adam at a constant rate, batch norms estimated anew before the test
    "paper/z2cnn": Config(**{**vars(_PAPER), "model": "z2cnn", "epochs": 300}),
    "paper/p4cnn": Config(**{**vars(_PAPER), "model": "p4cnn", "epochs": 100}),
    "paper/p4cnn-rotpool": Config(**{**vars(_PAPER), "model": "p4cnn-rotpool", "epochs": 100}),
    # the same 24,680 parameters, without augmentation, with a learning rate that falls
    "decay/p4cnn": Config(
        **{**vars(_PAPER), "model": "p4cnn", "epochs": 200, "schedule": "cosine", "lr": 0.01, "weight_decay": 0.1}
    ),
    # the digits that come with the package, in minutes on a laptop
    "demo/z2cnn": Config(model="z2cnn", epochs=6, schedule="cosine", lr=4e-3, test_every=6),
    "demo/p4cnn": Config(model="p4cnn", epochs=6, schedule="cosine", lr=8e-3, test_every=6),
}
"""Name -> config. A config file or options on the command line change single settings of a recipe."""
