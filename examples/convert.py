"""Your own network and training loop, one line more: a ResNet beside its p4 version, on 500 digits. Arguments: seed, epochs."""

import sys

import torch

from gcnn import convert, p4
from gcnn.data import digits
from gcnn.models.planar import BasicBlock, ResNet

seed, epochs, data = *map(int, sys.argv[1:] or (0, 1)), digits()
x, y = data.train.images[:500].float() / 255, data.train.labels[:500]
torch.manual_seed(seed)
net = ResNet(BasicBlock, (1, 1, 1), widths=(16, 32, 64), num_classes=10, in_channels=1, stem=3)
for name, model in (("plain", net), ("p4", convert(net, p4))):  # the line
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * 8)
    for batch in (part for _ in range(epochs) for part in torch.randperm(500).chunk(8)):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        answers = torch.cat([model.eval()(part.float() / 255).argmax(1) for part in data.test.images.split(500)])
    print(f"{name}: {100 * float((answers != data.test.labels).double().mean()):.2f} %", flush=True)
