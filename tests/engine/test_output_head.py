"""The output head of any architecture: values and gradients of the model's own forward pass."""

import numpy as np
import pytest
import torch
from core_engine import SHARDED, engine_recipe, make_rows, open_engine, relative
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_replay.engine.models import load_policy
from grpo_replay.engine.policy_module import (
    LogitSettings,
    PolicyModule,
    find_body,
    find_head,
    use_fp32_head,
)
from grpo_replay.errors import ModelError

SIZES = {
    "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 24, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3,
}  # fmt: skip
HEADS = {
    "cohere": {"logit_scale": 0.0625},
    "granite": {"logits_scaling": 8.0},
    "gemma2": {"final_logit_softcapping": 2.0, "head_dim": 16},
    "phi": {},
    "falcon_h1": {"lm_head_multiplier": 0.3, "mamba_d_ssm": 64, "mamba_n_heads": 2,
                  "mamba_d_head": 32},
    "hyperclovax": {"logits_scaling": 0.5},
    "gpt2": {}, "gpt_neox": {}, "opt": {"word_embed_proj_dim": 16},
}  # fmt: skip
"""What each does between hidden states and logits, or where it keeps body and head."""


def random_model(kind: str, tied: bool = True, dtype: str = "float32"):
    config = AutoConfig.for_model(kind, **SIZES | HEADS[kind], tie_word_embeddings=tied)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype), attn_implementation="eager"
        )
        head = model.get_output_embeddings()
        if head.bias is not None:
            torch.nn.init.normal_(head.bias)
    return model.eval()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", HEADS)
def test_values_and_gradients_are_those_of_the_models_own_logits(kind, tied):
    model, temperature, chunk_tokens = random_model(kind, tied), 0.7, 7
    ids = torch.randint(3, 24, (2, 13), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(12), 13 + torch.arange(12)])
    targets, weights = ids[:, 1:].flatten(), torch.linspace(-1, 1, 24)

    def gradient(logprobs: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        (logprobs * weights).sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1) / temperature
    expected = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
    expected_gradient = gradient(expected)
    found, entropies = PolicyModule(model, temperature, chunk_tokens)(ids, positions, targets)
    assert (found - expected).abs().max() < 1e-5
    assert torch.allclose(
        entropies, torch.distributions.Categorical(logits=logits).entropy(), atol=1e-5
    )
    assert relative(gradient(found), expected_gradient) < 2e-6


def fp32_logprobs(model, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """As anyone would compute them from the model's hidden states and an fp32 copy of its head."""
    hidden = find_body(model)(input_ids=ids).last_hidden_state[:, :-1].flatten(0, 1)
    head, settings = find_head(model), LogitSettings.of(model.config)
    bias = None if head.bias is None else head.bias.float()
    logits = torch.nn.functional.linear(hidden.float(), head.weight.float(), bias) * settings.scale
    if settings.cap is not None:
        logits = torch.tanh(logits / settings.cap) * settings.cap
    return torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]


@pytest.mark.parametrize("kind, tied", [("cohere", True), ("gemma2", False), ("phi", True)])
def test_an_fp32_head_has_values_and_gradients_of_a_plain_fp32_product(kind, tied):
    model, chunk_tokens = random_model(kind, tied, dtype="bfloat16"), 7
    ids = torch.randint(3, 24, (2, 13), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(12), 13 + torch.arange(12)])
    targets, weights = ids[:, 1:].flatten(), torch.linspace(-1, 1, 24)

    def gradient(logprobs: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        (logprobs * weights).sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    with torch.no_grad():
        rounded = PolicyModule(model, 1.0, chunk_tokens)(ids, positions, targets)[0]
    use_fp32_head(model)
    module = PolicyModule(model, 1.0, chunk_tokens)
    with torch.no_grad():
        own = module(ids, positions, targets, through_logits=True)[0]
    expected = fp32_logprobs(model, ids, targets)
    expected_gradient = gradient(expected)
    found, _ = module(ids, positions, targets)
    assert (found - expected).abs().max() < 1e-5 and (own - expected).abs().max() < 1e-5
    assert (rounded - expected).abs().max() > 1e-4, "bfloat16 logits are rounded"
    assert relative(gradient(found).float(), expected_gradient.float()) < 1e-2


def test_an_engine_shards_an_fp32_head_without_changing_it(processes):
    rows = make_rows(5)
    asked = {
        "model": {"dtype": "bfloat16"},
        "sampling": {"vllm": {"hf_overrides": {"head_dtype": "float32"}}},
    }
    plain = load_policy(engine_recipe(**asked).model, 0, fp32_head=True)
    found, norms = {}, {}
    for stage in (2, 3):
        sections = {"engine": SHARDED | {"zero_stage": stage}}
        with open_engine(processes, **asked, **sections) as engine:
            found[stage] = np.concatenate(engine.logprobs(rows))
            norms[stage] = engine.update(rows).grad_norm
    expected = []
    for row in rows:
        ids = torch.tensor([*row.prompt_token_ids, *row.completion_token_ids])
        logprobs = fp32_logprobs(plain, ids[None], ids[1:])
        expected.append(logprobs[len(row.prompt_token_ids) - 1 :].detach().numpy())
    assert np.array_equal(found[2], found[3]) and norms[3] == pytest.approx(norms[2], rel=1e-2)
    gap = np.abs(found[3] - np.concatenate(expected))
    assert gap.mean() < 0.01, "rows are padded otherwise, so the body's roundings differ"


def test_a_head_without_the_models_scale_is_refused_when_the_engine_opens(processes, monkeypatch):
    monkeypatch.setattr(LogitSettings, "of", lambda config: LogitSettings())
    with (
        pytest.raises(ModelError, match=r"type granite .*logits_scaling 8\.0"),
        open_engine(processes, random_model("granite"), engine={"zero_stage": 3}),
    ):
        pass


def test_a_head_that_is_more_than_a_linear_layer_is_refused(processes):
    config = AutoConfig.for_model("bert", **SIZES, is_decoder=True)
    model = AutoModelForCausalLM.from_config(config)
    with (
        pytest.raises(ModelError, match=r"type bert .*its head is more than a linear layer"),
        open_engine(processes, model),
    ):
        pass
