"""Your own network, your own training loop, one line more: 500 rotated digits, an ordinary ResNet beside its p4 version."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

from gcnn import convert, p4
from gcnn.data import digits
from gcnn.models.planar import BasicBlock, ResNet


def error_after_training(model: nn.Module, epochs: int) -> float:
    data = digits()
    x, y = data.train.images[:500].float() / 255, data.train.labels[:500]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * 8)
    for _ in range(epochs):
        for batch in torch.randperm(500).chunk(8):
            loss = F.cross_entropy(model(x[batch]), y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    model.eval()
    with torch.no_grad():
        answers = torch.cat([model(part.float() / 255).argmax(1) for part in data.test.images.split(500)])
    return 100 * float((answers != data.test.labels).double().mean())


def main(seeds: int = 1, epochs: int = 1) -> None:
    for seed in range(seeds):
        torch.manual_seed(seed)
        net = ResNet(BasicBlock, (1, 1, 1), widths=(16, 32, 64), num_classes=10, in_channels=1, stem=3)
        turned = convert(net, p4)  # the line
        print(
            f"seed {seed}: plain {error_after_training(net, epochs):.2f} %, p4 {error_after_training(turned, epochs):.2f} %",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=1)
    main(**vars(parser.parse_args()))
