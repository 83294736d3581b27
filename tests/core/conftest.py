import pytest
import torch
from core_engine import engine_recipe

from grpo_replay.backends.deepspeed_engine import initialize_processes


@pytest.fixture(scope="session")
def processes():
    """(Comm, device) of this process, a run of one rank; DeepSpeed is initialised once."""
    torch.set_num_threads(1)
    return initialize_processes(engine_recipe())
