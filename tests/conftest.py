from common import _seed

__all__ = ["_seed"]
