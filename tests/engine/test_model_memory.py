"""Loading a model takes memory of a rank's own only where weights have to be converted."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from grpo_replay.engine.models import load_policy
from grpo_replay.recipe import ModelSection

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")


def mapped_share(model: torch.nn.Module, file: Path) -> float:
    """Share of the parameters' bytes that lie in a mapping of the file."""
    ranges = [
        tuple(int(end, 16) for end in line.split()[0].split("-"))
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(str(file))
    ]
    inside = [
        parameter.nbytes
        for parameter in model.parameters()
        if any(start <= parameter.data_ptr() < end for start, end in ranges)
    ]
    return sum(inside) / sum(parameter.nbytes for parameter in model.parameters())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A bfloat16 checkpoint of 13 million parameters."""
    config = Qwen3Config(
        vocab_size=2048, hidden_size=512, intermediate_size=1536, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


@pytest.mark.parametrize("dtype, share", [("bfloat16", 1.0), ("float32", 0.0)])
def test_weights_are_mapped_unless_they_are_converted(folder, dtype, share):
    model = load_policy(ModelSection(path=str(folder), tokenizer="builtin:bytes", dtype=dtype), 0)
    assert mapped_share(model, folder / "model.safetensors") == share
