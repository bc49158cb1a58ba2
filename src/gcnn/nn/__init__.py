"""The layers of a G-CNN as torch modules, for every group from one class each (paper, section 6).

Each layer takes a group and then the arguments of its namesake in torch.nn; the dimension comes from the group. Maps are
plain tensors (N, K, S, *X). Correlations and pools are functions of `gcnn.functional`; norms and GLinear are here.
"""

from gcnn.nn.conv import GConv, GConvTranspose, GDepthwiseConv, GLinear, LiftConv
from gcnn.nn.norm import GBatchNorm, GLayerNorm
from gcnn.nn.pool import CosetPool, GAdaptiveAvgPool, GAvgPool, GMaxPool, GPool, GSubsample, GUpsample, Restrict

__all__ = [
    "CosetPool",
    "GAdaptiveAvgPool",
    "GAvgPool",
    "GBatchNorm",
    "GConv",
    "GConvTranspose",
    "GDepthwiseConv",
    "GLayerNorm",
    "GLinear",
    "GMaxPool",
    "GPool",
    "GSubsample",
    "GUpsample",
    "LiftConv",
    "Restrict",
]
