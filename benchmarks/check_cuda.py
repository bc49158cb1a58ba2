"""A quick look that the layers do on a GPU what they do on the CPU, forward and backward, for groups of every lattice."""

from __future__ import annotations

import copy

import torch
from torch import nn

from gcnn import GROUPS
from gcnn.export import planar
from gcnn.nn import CosetPool, GBatchNorm, GConv, GDepthwiseConv, GLinear, GMaxPool, LiftConv
from gcnn.testing import equivariance_error, explain


def main() -> None:
    """Prints one line a group."""
    for name in ("linem", "p4", "p4m", "p6m", "D4", "Oh", "D6h"):
        group = GROUPS[name]
        size = 9 if group.dim < 3 else 5
        net = nn.Sequential(
            LiftConv(group, 2, 4, 3, padding=1),
            GBatchNorm(group, 4),
            nn.ReLU(),
            GMaxPool(group, 3, 2, 1),
            GDepthwiseConv(group, 4, 4, 3, padding=1),
            GConv(group, 4, 4, 3, padding=1),
            CosetPool(group),
        )
        net = net.double()
        x = torch.rand(2, 2, *(size,) * group.dim, dtype=torch.float64)
        there = copy.deepcopy(net).cuda()
        y, z = net(x), there(x.cuda())
        y.square().sum().backward()
        z.square().sum().backward()
        ours, theirs = ([p.grad.cpu() for p in m.parameters() if p.grad is not None] for m in (net, there))
        gradients = max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))
        plain = float((planar(there)(x.cuda()) - there.eval()(x.cuda())).detach().abs().max())
        print(
            f"{name}: output {float((y - z.cpu()).detach().abs().max()):.1e}, gradients {gradients:.1e}, planar {plain:.1e}, "
            f"equivariance {equivariance_error(there, group, x.cuda()):.1e}, explain {explain(there, x.cuda(), group).exact}"
        )


def algorithms(device: str = "cuda") -> None:
    """Prints how far the Fourier algorithm there is from the planar one on the CPU, exact float32 products among it."""
    torch.backends.cudnn.allow_tf32 = False
    for name, k in (("linem", 5), ("p4", 9), ("p4m", 45), ("p6m", 6), ("T", 4), ("O", 4), ("Oh", 2)):
        group = GROUPS[name]
        size = 9 if group.dim < 3 else 4
        for dtype in (torch.float64, torch.float32):
            torch.manual_seed(0)
            here = GConv(group, k, k + 1, 3, padding=1, algorithm="planar").double()
            there = GConv(group, k, k + 1, 3, padding=1, algorithm="fourier").to(device, dtype)
            there.load_state_dict(here.state_dict())
            x = torch.randn(2, k, group.order, *(size,) * group.dim, dtype=torch.float64)
            maps = x.clone().requires_grad_(), x.to(device, dtype).requires_grad_()
            results = [layer(m) for layer, m in zip((here, there), maps, strict=True)]
            dy = torch.randn_like(results[0])
            for y in results:
                y.backward(dy.to(y.device, y.dtype))
            pairs = [results, [m.grad for m in maps], [here.weight.grad, there.weight.grad]]
            errors = [float((b.detach().cpu() - a.detach()).norm() / a.detach().norm()) for a, b in pairs]
            print(f"{name} K={k} {dtype}: map {errors[0]:.1e}, its gradient {errors[1]:.1e}, filters' gradient {errors[2]:.1e}")


# group, K, kernel: 0 for a linear layer
NARROW = (("p4m", 64, 3), ("p4m", 40, 3), ("p4m", 128, 1), ("p4m", 128, 0), ("p4", 64, 5), ("cm", 32, 2), ("D4", 16, 3))


def narrow(cases: tuple[tuple[str, int, int], ...] = NARROW) -> None:
    """Prints how far the Fourier algorithm in one kernel is from the planar one in float64, beside how far that one is itself."""
    for name, k, n in cases:
        group = GROUPS[name]
        torch.manual_seed(0)
        # with kernels of one cell the number of channels suits both ways
        layer = (GConv(group, k, k + 8 * (n > 1), n, padding=n // 2) if n else GLinear(group, k, k)).cuda()
        space = (9 if group.dim < 3 else 5,) * group.dim if n else ()
        x = torch.randn(8 if n else 1000, k, group.order, *space, device="cuda")
        for precision in ("tf32", "bf16"):
            torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
            found: dict[str, list[torch.Tensor]] = {}
            for algorithm in ("exact", "planar", "fourier", "again"):
                exact = algorithm == "exact"
                net, leaf = copy.deepcopy(layer), x.double() if exact else x.clone()
                net = net.double() if exact else net
                net.algorithm = "planar" if algorithm in ("exact", "planar") else "fourier"
                with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16" and not exact):
                    y = net(leaf.requires_grad_())
                dy = torch.randn(y.shape, generator=torch.Generator("cuda").manual_seed(0), device="cuda").to(y.dtype)
                gradients = torch.autograd.grad(y, (leaf, net.weight), dy)
                found[algorithm] = [t.detach().double() for t in (y, *gradients)]
            ratios = [float((f - e).norm() / (p - e).norm()) for e, p, f in zip(*list(found.values())[:3], strict=True)]
            same = all(torch.equal(a, b) for a, b in zip(found["fourier"], found["again"], strict=True))
            print(f"{name} K={k} {n} {precision}: errors beside the planar algorithm's {ratios}, the same in every run: {same}")


def compiled() -> None:
    """Prints how far a compiled block's results and gradients are from those of the block itself."""
    for name in ("p4m", "p6m"):
        group = GROUPS[name]
        first = GConv(group, 8, 8, 3, padding=1, bias=False)
        net = nn.Sequential(first, GBatchNorm(group, 8), nn.ReLU(), GConv(group, 8, 4, 3)).cuda()
        for amp in (False, True):
            found = []
            x = torch.randn(4, 8, group.order, 17, 17, device="cuda")
            for each in (net, torch.compile(copy.deepcopy(net), fullgraph=True)):
                leaf = x.clone().requires_grad_()
                with torch.autocast("cuda", torch.bfloat16, enabled=amp):
                    y = each(leaf)
                each.zero_grad()
                y.float().square().sum().backward()
                gradients = [p.grad for p in each.parameters() if p.grad is not None]
                found.append([y.detach().float(), leaf.grad, *(g.clone() for g in gradients)])
            far = max(float((a - b).norm() / a.norm()) for a, b in zip(*found, strict=True))
            print(f"{name} compiled, {'bf16' if amp else 'float32'}: {far:.1e}")


def repeated() -> None:
    """Prints whether the gradients of two runs have the same bits, in every precision and by both algorithms."""
    for precision in ("float32", "tf32", "bf16"):
        torch.backends.cudnn.allow_tf32 = precision == "tf32"
        for name, k, algorithm in (("p4", 10, "planar"), ("p4m", 32, "planar"), ("p4m", 64, "fourier"), ("p6m", 8, "planar")):
            group = GROUPS[name]
            torch.manual_seed(0)
            net = nn.Sequential(
                LiftConv(group, 3, k, 3, padding=1),
                GBatchNorm(group, k),
                nn.ReLU(),
                GConv(group, k, k, 3, padding=1, algorithm=algorithm),
                CosetPool(group),
            ).cuda()
            x, runs = torch.randn(64, 3, 17, 17, device="cuda"), []
            for _ in range(4):
                with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
                    y = net(x)
                y.float().square().sum().backward()
                runs.append([p.grad.clone() for p in net.parameters()])
                net.zero_grad()
            same = all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))
            print(f"{name} K={k} {algorithm} {precision}: gradients the same in every run: {same}")


if __name__ == "__main__":
    main()
    algorithms()
    narrow()
    repeated()
    compiled()
