"""Ordinary networks as users write them, which know nothing of groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gcnn.models import planar


class InPlaceBlock(nn.Module):
    """A block with in-place functions and a shortcut that may be missing."""

    def __init__(self, k_in: int, k: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(k_in, k, 3, stride, 1, bias=False), nn.BatchNorm2d(k)
        self.conv2, self.bn2 = nn.Conv2d(k, k, 3, 1, 1, bias=False), nn.BatchNorm2d(k)
        self.relu = nn.ReLU(inplace=True)
        self.squeeze, self.excite = nn.Conv2d(k, 4, 1), nn.Conv2d(4, k, 1)
        self.downsample = None if stride == 1 else nn.Conv2d(k_in, k, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        weight = F.adaptive_avg_pool2d(out, 1)
        out = out * torch.sigmoid(self.excite(F.relu(self.squeeze(weight))))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class SmallResNet(nn.Module):
    def __init__(self, num_classes: int = 10, in_channels: int = 3, width: int = 16) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(in_channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.layer1, self.layer2 = InPlaceBlock(width, width), InPlaceBlock(width, 2 * width, 2)
        self.fc = nn.Linear(2 * width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.conv(x)), inplace=True)
        x = self.layer2(self.layer1(x))
        x = x.mean(dim=(2, 3))
        out: Tensor = self.fc(x)
        return out


class VGG(nn.Module):
    def __init__(self, num_classes: int = 10, hidden: int = 64) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        k_in = 3
        for k in (16, 32, 32):
            layers += [nn.Conv2d(k_in, k, 3, padding=1), nn.ReLU(True), nn.MaxPool2d(2, 2)]
            k_in = k
        self.features, self.avgpool = nn.Sequential(*layers), nn.AdaptiveAvgPool2d((4, 4))
        self.classifier = nn.Sequential(
            nn.Linear(32 * 16, hidden),
            nn.ReLU(True),
            nn.Dropout(),
            nn.Linear(hidden, hidden),
            nn.ReLU(True),
            nn.Dropout(),
            nn.Linear(hidden, num_classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.avgpool(self.features(x))
        x = x.view(x.size(0), -1)
        out: Tensor = self.classifier(x)
        return out


class Segmenter(nn.Module):
    """A U-Net that asks for shapes when it runs, with norms and dropouts of several kinds."""

    def __init__(self, k: int = 16, num_classes: int = 3) -> None:
        super().__init__()
        self.d1, self.d2, self.d3 = self._double(1, k), self._double(k, 2 * k), self._double(2 * k, 4 * k)
        self.up = nn.ConvTranspose2d(4 * k, 2 * k, 2, 2)
        self.u2, self.u1, self.out = self._double(4 * k, 2 * k), self._double(3 * k, k), nn.Conv2d(k, num_classes, 1)

    @staticmethod
    def _double(k_in: int, k: int) -> nn.Sequential:
        first = (nn.Conv2d(k_in, k, 3, padding=1), nn.InstanceNorm2d(k, affine=True), nn.PReLU(k), nn.Dropout2d(0.1))
        return nn.Sequential(*first, nn.Conv2d(k, k, 3, padding=1), nn.GroupNorm(4, k), nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        a = self.d1(x)
        b = self.d2(F.max_pool2d(a, 2))
        c = self.d3(F.avg_pool2d(b, kernel_size=2))
        y = self.u2(torch.cat([self.up(c), b], dim=1))
        y = F.interpolate(y, size=a.shape[2:], mode="bilinear", align_corners=False)
        out: Tensor = self.out(self.u1(torch.cat((y, a), 1)))
        return out


class Denoiser(nn.Module):
    """An image minus what a network finds in it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x - self.last(F.leaky_relu(self.first(x), 0.2))


class Branching(nn.Module):
    """What torch.fx cannot trace: it looks at the numbers."""

    def __init__(self, width: int = 16, num_classes: int = 5) -> None:
        super().__init__()
        self.conv1, self.bn = nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.conv1(x)))
        if float(x.detach().mean()) > -1:
            x = self.conv2(x)
        out: Tensor = self.fc(torch.flatten(self.pool(x), 1))
        return out


def signals() -> nn.Module:
    first = (nn.Conv1d(2, 16, 5, padding=2), nn.BatchNorm1d(16), nn.LeakyReLU(), nn.Dropout1d(0.1), nn.MaxPool1d(2))
    second = (nn.Conv1d(16, 32, 3, padding=1), nn.PReLU(32), nn.AdaptiveAvgPool1d(1), nn.Flatten())
    return nn.Sequential(*first, *second, nn.Linear(32, 3))


def volumes() -> nn.Module:
    return planar.ResNet(planar.BasicBlock, (1, 1), (16, 32), num_classes=4, in_channels=1, dim=3, stem=3)


# name -> (network, shape of an image at which its strides are exact, group)
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "small resnet": (SmallResNet, (3, 17, 17), "p4m"),
    "vgg": (VGG, (3, 32, 32), "p4m"),
    "segmenter": (Segmenter, (1, 16, 16), "p4"),
    "denoiser": (Denoiser, (3, 9, 9), "p4m"),
    "resnet18": (lambda: planar.ResNet(planar.BasicBlock, (2, 2, 2, 2), num_classes=10), (3, 33, 33), "p4m"),
    "resnet50": (lambda: planar.ResNet(planar.Bottleneck, (3, 4, 6, 3), num_classes=10), (3, 33, 33), "p4"),
    "densenet121": (planar.DenseNet, (3, 29, 29), "p4"),
    "unet": (lambda: planar.UNet(16, 2), (3, 16, 16), "p4m"),
    "convnext": (lambda: planar.ConvNeXt((1, 1), (32, 64), num_classes=10), (3, 32, 32), "p4"),
    "volumes": (volumes, (1, 9, 9, 9), "O"),
    "signals": (signals, (2, 16), "linem"),
}


def drawn(name: str) -> tuple[nn.Module, Tensor, Any]:
    """The network with weights and statistics of its own, an image, and the name of the group."""
    make, shape, group = NETWORKS[name]
    torch.manual_seed(0)
    net = make().train()
    for _ in range(2):
        net(torch.randn(3, *shape) + 0.2)
    return net.eval(), torch.randn(2, *shape), group
