import torch

from common import _seed

__all__ = ["_seed"]

torch.set_num_threads(1)  # pytest-xdist has a process for each core; threads of their own would only get in each other's way
