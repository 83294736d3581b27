import pytest
import torch
from naive_sampler import qwen3


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def model():
    return qwen3()
