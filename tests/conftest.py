import pytest
import torch

torch.set_num_threads(1)  # pytest-xdist has a process for each core; threads of their own would only get in each other's way


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
