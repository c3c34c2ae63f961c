"""The device that kernels run on: a GPU where there is one, else the CPU, interpreted."""

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    pytest.importorskip("triton")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
