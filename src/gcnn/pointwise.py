"""What works number by number, and so on maps as on images: modules, functions and methods that need no version of ours."""

from __future__ import annotations

import operator
import threading
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

# number by number and with 0 at 0: what is garbage outside a hexagonal domain may stay so until something looks at it
KEEP_ZERO_MODULES = (
    *(nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish, nn.Tanh),
    *(nn.Softsign, nn.Softshrink, nn.Hardshrink, nn.Tanhshrink, nn.RReLU, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
)
KEEP_ZERO: set[Any] = {
    *(F.relu, F.leaky_relu, F.elu, F.gelu, F.silu, F.mish, F.hardswish, F.dropout, F.dropout1d, F.dropout2d, F.dropout3d),
    *(F.relu6, F.tanh, F.softsign, F.selu, F.celu, torch.relu, torch.tanh, torch.square, torch.sqrt, torch.abs, torch.neg),
    *(torch.sin, operator.neg, "relu", "relu_", "tanh", "square", "sqrt", "abs", "neg", "contiguous", "clone", "detach"),
    *("float", "double", "half", "bfloat16", "to", "log1p", torch.log1p, torch.relu_, F.leaky_relu_, F.elu_, torch.tanh_),
    *(torch.erf, torch.sign, torch.expm1, torch.atan, torch.arctan, F.softshrink, F.hardshrink, F.tanhshrink, "tanh_", "erf"),
    *("sign", "expm1", "atan", "arctan", "sin", "neg_", "abs_"),
}
KEEP_ZERO_OF_TWO: set[Any] = {
    *(torch.add, torch.sub, torch.mul, torch.maximum, torch.minimum, operator.add, operator.sub, operator.mul, operator.iadd),
    *(operator.isub, operator.imul, "add", "add_", "sub", "sub_", "mul", "mul_"),
}
ALIASES = {"detach", "to", "float", "double", "half", "bfloat16", "type_as"}  # which may give back the tensor itself
IN_PLACE = {
    *(operator.iadd, operator.isub, operator.imul, operator.itruediv, "relu_", "add_", "sub_", "mul_", "div_", "clamp_", "clip_"),
    *(torch.relu_, F.leaky_relu_, F.elu_, torch.tanh_, torch.sigmoid_, "tanh_", "sigmoid_", "exp_", "neg_", "abs_"),
    *("clamp_min_", "clamp_max_"),
}
POINTWISE_MODULES = (*KEEP_ZERO_MODULES, nn.Hardtanh, nn.Sigmoid, nn.LogSigmoid, nn.Softplus, nn.Hardsigmoid, nn.Threshold)
POINTWISE_FUNCTIONS = {f for f in KEEP_ZERO | KEEP_ZERO_OF_TWO if not isinstance(f, str)} | {
    *(F.softplus, F.hardsigmoid, F.hardtanh, F.sigmoid, F.logsigmoid, torch.sigmoid, torch.div, torch.pow, torch.exp),
    *(
        torch.log,
        torch.clamp,
        torch.clip,
        torch.cos,
        torch.sigmoid_,
        F.threshold,
        torch.threshold,
        operator.truediv,
        operator.pow,
    ),
    operator.itruediv,
}
POINTWISE_METHODS = {f for f in KEEP_ZERO | KEEP_ZERO_OF_TWO if isinstance(f, str)} | {
    *("sigmoid", "sigmoid_", "div", "div_", "pow", "exp", "exp_", "log", "cos", "clamp", "clamp_", "clip", "clip_", "type_as"),
    *("clamp_min_", "clamp_max_"),
}


TRACING = threading.RLock()
"""For who traces: torch.fx, and what we refuse while it works, change torch for all threads until they are done."""


class InPlaceProxy(fx.Proxy):
    """A value that is traced with its changes in place.

    torch.fx would make sums of `x += y`, and another name of the same tensor would miss the change.
    """

    def _in_place(self, operation: Any, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", operation, (self, other), {})

    def __iadd__(self, other: Any) -> Any:
        return self._in_place(operator.iadd, other)

    def __isub__(self, other: Any) -> Any:
        return self._in_place(operator.isub, other)

    def __imul__(self, other: Any) -> Any:
        return self._in_place(operator.imul, other)

    def __itruediv__(self, other: Any) -> Any:
        return self._in_place(operator.itruediv, other)
