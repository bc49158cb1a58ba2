"""Settings of a training run: one frozen dataclass with defaults that the command line, TOML files and recipes fill."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_type_hints

from gcnn.checks import unknown
from gcnn.groups import GROUPS
from gcnn.models import ALIASES, MODELS

__all__ = ["Config"]


@dataclass(frozen=True)
class Config:
    """Settings of a run."""

    model: str = "p4cnn"
    """A name from `gcnn.models.MODELS`: p4cnn, z2cnn, digit-resnet; for CIFAR-10 allcnn-c, resnet44, resnet26; for volumes
    voxel-resnet; `gcnn models` lists them."""
    group: str = ""
    """Another group for the model, by its name: p4m, p6 ... Empty: the model's own."""
    channels: int = 0
    """Another number of channels for z2cnn and its relatives and allcnn-c. 0: the model's own."""
    widths: tuple[int, ...] = ()
    """Other widths for residual networks, one per stage. Empty: the model's own. For resnet44, resnet26 and the networks of this
    package they are channels on the group; for converted ones (resnet18 ...) those of the ordinary network, of which there are
    fewer on a group: p4m takes about a third, and as many parameters."""
    downsample: Literal["", "stride", "pool"] = ""
    """How allcnn-c and residual networks halve maps: stride as in the paper, or pool, exact on even sizes. Empty: as they do."""
    invariant: bool = False
    """For residual networks: take the mean over the group before the classes, so that turned images get the same answer."""
    data: str = "digits"
    """digits (comes with the package), mnist, rotated_mnist, cifar10, whitened_cifar10 (as the authors had it), volumes,
    pictures (folders train/CLASS, test/CLASS, and val/CLASS if there is one, of image files)."""
    data_root: str = ""
    """The folder with the files of the data set, or the .npz file of volumes; not needed for digits."""
    size: int = 0
    """Resize square pictures to this many pixels each way, here and in `gcnn predict`. 0: as they are."""
    init: str = ""
    """Start from the weights of the run in this folder. For other classes the last layer starts fresh."""
    validation: int = 0
    """Hold out the last n training images and test on them: for choosing settings without the test set. Pictures in val/CLASS
    are the last ones. Those of one patient, slide or scene belong on one side: put them into val yourself."""
    epochs: int = 20
    """Passes over the training set."""
    batch_size: int = 128
    """Images a step, over all processes together."""
    optimizer: Literal["adam", "sgd"] = "adam"
    """Adam, or stochastic gradient descent with momentum 0.9."""
    lr: float = 1e-3
    """Learning rate."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Keep the learning rate, or let it fall to zero along a cosine or a line."""
    warmup: float = 0.0
    """Let the learning rate rise from zero over this many epochs first."""
    drops: tuple[int, ...] = ()
    """Divide the learning rate by ten after each of these epochs."""
    sharpness: float = 0.0
    """Sharpness-aware minimisation: step along the gradient found this far uphill, 0.1 for example, in twice the time."""
    sharp_epochs: int = 0
    """Do so in the last n epochs only, where it matters most. 0: in all of them."""
    weight_decay: float = 0.0
    """Weight decay: decoupled with adam, added to the gradient with sgd."""
    balanced: bool = False
    """Weigh the loss so that every class counts as much, however few images it has."""
    label_smoothing: float = 0.0
    """Share of the target that is spread over all classes."""
    dropout: float = -1.0
    """Another dropout than the model's own. Negative: the model's own."""
    rotate: float = 0.0
    """Augmentation: turn every training image by a random angle of up to this many degrees; outside it is black, for
    pictures reflected."""
    shift: int = 0
    """Augmentation: move every training image by a random number of up to this many pixels each way; outside it
    is black, for pictures reflected."""
    flip: bool = False
    """Augmentation: mirror half of the training images, left to right. Of no use with groups that mirror, such as p4m."""
    reestimate: Literal["eval", "train", "no"] = "eval"
    """Estimate the statistics of batch norms anew over the training set before each test: with the rest of the network as in
    the test, or as in training (with dropout), as the paper's authors did."""
    test_every: int = 1
    """Test after every n-th epoch, and after the last."""
    keep: Literal["last", "best"] = "last"
    """The weights that a run ends with: those of the last epoch, or those with the lowest loss on the held-out images."""
    test_turns: int = 1
    """Test with the mean answer to each image turned by 0, 1, ... n - 1 n-ths of a quarter turn."""
    seed: int = 0
    """Everything random follows from it."""
    device: str = "auto"
    """auto (cuda, mps or cpu), or a device of torch."""
    amp: bool = False
    """Automatic mixed precision, bfloat16; the network is tested in it too. `gcnn eval` and `predict` work in float32."""
    tf32: bool = True
    """On cuda, let the convolutions of training round float32 inputs to TF32, as torch does. Tests in float32 never do."""
    compile: bool = False
    """torch.compile the network."""
    graphs: bool = True
    """On cuda, replay each step as one CUDA graph."""
    sync_norm: bool = False
    """With several processes, share the statistics of batch norms among them."""

    def __new__(cls, *_: Any, **settings: Any) -> Config:
        """The settings; a TypeError that names the known ones for one that is none of them."""
        known = [setting.name for setting in dataclasses.fields(cls)]
        if foreign := [name for name in settings if name not in known]:
            raise TypeError("Config: " + unknown("setting", foreign[0], known))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for setting in dataclasses.fields(self):
            value, kind = getattr(self, setting.name), type(setting.default)
            fits = isinstance(value, int | float) if kind is float else isinstance(value, list | tuple if kind is tuple else kind)
            if not fits or (isinstance(value, bool) and kind is not bool):
                way = f"; write a list, [{value}]" if kind is tuple and isinstance(value, int) else ""
                raise ValueError(f"{setting.name} must be of type {kind.__name__}, got {value!r}{way}")
        for name, value in dataclasses.asdict(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name} must be a finite number, got {value}")
        for name in ("widths", "drops"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
            if not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in getattr(self, name)):
                raise ValueError(f"{name} must be positive whole numbers, got {getattr(self, name)}")
        for name in ("rotate", "weight_decay", "channels", "validation", "size"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if not -(2**43) <= self.seed <= 2**44:  # each epoch has a seed of its own, a million times this one
            raise ValueError(f"seed must be a whole number from -2**43 to 2**44, got {self.seed}")
        for name in ("epochs", "batch_size", "lr", "test_every", "test_turns"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        object.__setattr__(self, "model", ALIASES.get(self.model, self.model))
        if self.model not in MODELS:
            raise ValueError(unknown("model", self.model, MODELS))
        if self.group and self.group not in GROUPS:
            raise ValueError(unknown("group", self.group, GROUPS))
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing must be at least 0 and below 1, got {self.label_smoothing}")
        if self.dropout >= 1:
            raise ValueError(f"dropout must be below 1, got {self.dropout}")
        for name in ("downsample", "optimizer", "schedule", "reestimate", "keep"):
            value, allowed = getattr(self, name), get_args(get_type_hints(type(self))[name])
            if value not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(a or 'empty' for a in allowed)}, got {value!r}")
        if self.keep == "best" and not self.validation:
            raise ValueError(
                "keep = best needs images to choose by: hold some out with --validation, a tenth of the training images, say"
            )
        if self.data == "digits" and self.data_root:
            raise ValueError(
                f"digits come with the package and are in no data_root, got {self.data_root!r}; name the data set that is there "
                "as data (pictures, for folders of your own), or hand images to gcnn.train.train(config, data=...)"
            )
        if self.size and self.data != "pictures":
            raise ValueError(f"size is for pictures, {self.data} have a size of their own; set data to pictures, or size to 0")
        if self.sharpness < 0:
            raise ValueError(f"sharpness must be a distance, at least 0, got {self.sharpness}")
        if not 0 <= self.sharp_epochs <= self.epochs:
            raise ValueError(f"sharp_epochs must be at least 0 and at most the {self.epochs} epochs, got {self.sharp_epochs}")
        if self.sharp_epochs and not self.sharpness:
            raise ValueError(
                f"sharp_epochs is {self.sharp_epochs}, and sharpness 0: set sharpness, 0.1 for example, or sharp_epochs to 0"
            )
        if self.shift < 0:
            raise ValueError(f"shift must be a number of pixels, at least 0, got {self.shift}")
        if not 0 <= self.warmup < self.epochs:
            raise ValueError(f"warmup must be at least 0 and below the {self.epochs} epochs, got {self.warmup}")

    def rate(self, epochs: float) -> float:
        """The learning rate after so many epochs, a fraction of one too.

        >>> config = Config(lr=1.0, epochs=10, schedule="linear", warmup=2)
        >>> [config.rate(e) for e in (0, 1, 2, 6, 10)]
        [0.0, 0.5, 1.0, 0.5, 0.0]
        """
        lr = self.lr / 10 ** sum(epochs >= e for e in self.drops)
        if epochs < self.warmup:
            return lr * epochs / self.warmup
        done = (epochs - self.warmup) / (self.epochs - self.warmup)
        falls = {"constant": 1.0, "cosine": 0.5 * (1 + math.cos(math.pi * done)), "linear": 1 - done}
        return lr * falls[self.schedule]
