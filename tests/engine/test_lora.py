"""LoRA in the engine: against plain peft, at every ZeRO stage, saved, restored, refused."""

from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from core_engine import (
    SCALED,
    PlainTraining,
    engine_recipe,
    first_gradient,
    make_rows,
    open_engine,
    parameters,
    plain_loss,
    relative,
    tiny_model,
)
from peft import LoraConfig, PeftModel, get_peft_model

from grpo_replay.distributed.comm import Comm
from grpo_replay.engine.deepspeed_engine import DeepSpeedEngine
from grpo_replay.engine.models import load_policy
from grpo_replay.engine.weights import ADAPTER, LoraAdapters, _Weight, full_adapters
from grpo_replay.errors import RecipeError
from grpo_replay.recipe import LoraSection, resolve_recipe

LINEAR = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
LORA = {"r": 4, "lora_alpha": 8}
MODEL = {"lora": LORA}


class PlainLora(PlainTraining):
    """The plain twin with peft's own model: whole mini-batch in one graph."""

    def __init__(self, recipe) -> None:
        super().__init__(recipe)
        config = LoraConfig(r=4, lora_alpha=8, target_modules=LINEAR, task_type="CAUSAL_LM")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.run.seed)
            self.model = get_peft_model(self.model, config)
        self.trained = [p for p in self.model.parameters() if p.requires_grad]


def adapters_of(engine) -> dict[str, torch.Tensor]:
    engine._prepare_gather()
    return {name: tensor.clone() for name, tensor in full_adapters(engine._model, 2**29)}


def set_b(model: torch.nn.Module) -> None:
    """Values other than zero, so that A has a gradient too."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))


def test_the_gradient_of_every_adapter_is_that_of_autograd(processes):
    rows = make_rows(6)
    with open_engine(processes, model=MODEL) as engine:
        set_b(engine._model)
        engine.update(rows)
        found = first_gradient(engine)
    plain = PlainLora(engine_recipe(model=MODEL))
    set_b(plain.model)
    plain_loss(plain.model, rows, plain.recipe.loss).backward()
    expected = torch.cat([p.grad.flatten() for p in plain.trained])
    assert relative(found, expected) < 5e-6
    assert len(found) == len(expected) == sum(p.numel() for p in plain.trained)


def test_before_the_first_update_policy_and_weights_are_the_base_bit_for_bit(processes):
    rows = make_rows(6)
    model = {"dtype": "bfloat16"}
    engine_section = {"zero_stage": 3}
    with open_engine(processes, model=model, engine=engine_section) as engine:
        expected = engine.logprobs(rows)
        weights = {name: t.clone() for name, t in engine.named_full_tensors(2**29)}
    with open_engine(processes, model=model | MODEL, engine=engine_section) as engine:
        found = engine.logprobs(rows)
        merged = {name: t.clone() for name, t in engine.named_full_tensors(1000)}
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
    assert list(merged) == list(weights)
    assert all(torch.equal(merged[name], weights[name]) for name in weights)
    assert all(tensor.dtype == weights[name].dtype for name, tensor in merged.items())


def test_adapters_are_merged_in_fp32_and_rounded_once():
    """W + s·B·A of bfloat16 tensors, against float64."""
    generator = torch.Generator().manual_seed(3)
    weight, a, b = (
        torch.randn(shape, generator=generator).bfloat16() for shape in ((64, 64), (4, 64), (64, 4))
    )
    exact = weight.double() + 0.5 * (b.double() @ a.double())
    found = _Weight("w", (weight, a, b), scaling=0.5).whole()
    assert found.dtype == torch.bfloat16
    error = (found.double() - exact).abs()
    assert (error <= 2**-8 * exact.abs() + 1e-6).all(), "half a unit in the last place"


def test_only_the_targets_move(processes):
    lora = LORA | {"target_modules": ["q_proj", "down_proj"]}
    with open_engine(processes, model={"lora": lora}) as engine:
        engine.update(make_rows(6))
        found = {name: t.clone() for name, t in engine.named_full_tensors(2**29)}
    base = tiny_model().state_dict()
    moved = {name for name in base if not torch.equal(found[name], base[name])}
    expected = {name for name in base if "q_proj" in name or "down_proj" in name}
    assert moved == expected and len(moved) == 6


def test_biases_of_adapted_layers_keep_their_names(processes):
    """Qwen2.5 has biases at q, k and v."""
    override = {"random_init": {"attention_bias": True}}
    with open_engine(processes, model=MODEL | override) as engine:
        found = {name for name, _ in engine.named_full_tensors(2**29)}
    assert "model.layers.0.self_attn.q_proj.bias" in found
    assert not any("base_layer" in name or "lora" in name for name in found)


def test_saved_and_loaded_is_never_saved(processes, tmp_path):
    first, second = make_rows(6, 1), make_rows(6, 2)
    sections = {"engine": {"zero_stage": 3}, "model": MODEL}
    with open_engine(processes, **sections) as engine:
        engine.update(first)
        engine.save(tmp_path / "engine")
        expected = (engine.update(second), parameters(engine), adapters_of(engine))
    with open_engine(processes, **sections) as engine:
        engine.load(tmp_path / "engine")
        found = (engine.update(second), parameters(engine), adapters_of(engine))
    assert asdict(found[0]) == asdict(expected[0])
    assert torch.equal(found[1], expected[1])
    assert all(torch.equal(found[2][name], expected[2][name]) for name in expected[2])
    (file,) = (tmp_path / "engine").rglob("*model_states.pt")
    state = torch.load(file, weights_only=False)
    names = {name.removeprefix("model.") for name in state["module"]}
    assert names == set(expected[2]), "the base is not in the state"
    assert not state["frozen_param_fragments"]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "other"), [(0, 3), (3, 2)])
def test_a_state_is_restored_at_another_stage(processes, tmp_path, stage, other):
    rows = make_rows(5)
    sections = {"model": MODEL}
    with open_engine(processes, **sections, engine=SCALED | {"zero_stage": stage}) as engine:
        for _ in range(2):
            engine.update(rows)
        engine.save(tmp_path)
        expected = engine.update(rows), adapters_of(engine)
    with open_engine(processes, **sections, engine=SCALED | {"zero_stage": other}) as engine:
        engine.load(tmp_path)
        found = engine.update(rows), adapters_of(engine)
    assert found[0].grad_norm == pytest.approx(expected[0].grad_norm, rel=1e-5)
    for name, tensor in expected[1].items():
        assert relative(found[1][name], tensor) < 1e-6, name


def test_adapters_are_saved_in_the_format_of_peft(processes, tmp_path):
    with open_engine(processes, model=MODEL, engine={"zero_stage": 3}) as engine:
        engine.update(make_rows(6))
        engine.save_adapter(tmp_path / "adapter")
        merged = {name: t.clone() for name, t in engine.named_full_tensors(2**29)}
    loaded = PeftModel.from_pretrained(tiny_model(), tmp_path / "adapter").merge_and_unload()
    for name, tensor in loaded.named_parameters():
        assert relative(tensor, merged[name]) < 1e-6, name
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "README.md", "adapter_config.json", "adapter_model.safetensors",
    ]  # fmt: skip


def test_the_reference_is_the_base_without_a_copy_of_it(processes):
    rows = make_rows(6)
    sections = {"model": MODEL, "loss": {"beta": 0.1}, "engine": {"zero_stage": 3}}
    with open_engine(processes, **sections) as engine:
        base = engine.logprobs(rows)
        engine.update(rows)
        result = engine.update(rows)
        reference, policy = engine.reference_logprobs(rows), engine.logprobs(rows)
        assert engine._reference is None
    for a, b, c in zip(base, reference, policy, strict=True):
        assert a.tobytes() == b.tobytes()
        assert np.abs(b - c).max() > 1e-5
    assert result.reference_kl > 0


def test_dropout_is_of_updates_and_leaves_the_random_state():
    adapters = LoraAdapters.attach(tiny_model(), LoraSection(r=2, lora_dropout=0.5), seed=0)
    layer, before = adapters._layers[0], torch.random.get_rng_state()
    with adapters.dropout(3, torch.device("cpu")):
        dropped = layer.lora_dropout[ADAPTER](torch.ones(100))
    assert 0 < (dropped == 0).sum() < 100
    assert torch.equal(layer.lora_dropout[ADAPTER](torch.ones(100)), torch.ones(100))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_masks_of_dropout_differ_between_steps_updates_and_ranks():
    recipe = engine_recipe(model={"lora": LORA | {"lora_dropout": 0.1}})

    def seeds(rank: int, step: int) -> list[int]:
        """Of the two updates of a step."""
        adapters = SimpleNamespace(dropout=lambda seed, device: seed)
        engine = SimpleNamespace(
            _adapters=adapters, _recipe=recipe, _comm=Comm(rank, 2), _device="cpu", _step=step,
            _updates_of_step=0,
        )  # fmt: skip
        return [DeepSpeedEngine._dropout(engine) for _ in range(2)]

    found = [seed for rank in (0, 1) for step in (1, 2) for seed in seeds(rank, step)]
    assert len(set(found)) == 8
    assert seeds(0, 1) + seeds(0, 2) == found[:4]


@pytest.mark.parametrize("target", ["lm_head", "qproj"])
def test_a_target_that_is_no_linear_layer_of_a_block_is_refused(target):
    section = LoraSection(r=2, target_modules=["q_proj", target])
    with pytest.raises(RecipeError, match=rf"model.lora.target_modules: '{target}'.*q_proj"):
        LoraAdapters.attach(tiny_model(), section, seed=0)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"use_dora": True}, r": .*train model.layers.0.*lora_magnitude_vector.*remove use_dora"),
        ({"bias": "all"}, r": .*train model.layers.0.*bias"),
        ({"init_lora_weights": "pissa"}, r".init_lora_weights: .*lora_B.* does not begin at zero"),
        ({"target_modules": ["embed_tokens"]}, r".target_modules: 'embed_tokens' is no linear"),
        ({"nonsense": 1}, ": .*unexpected keyword argument 'nonsense'"),
    ],
)
def test_what_is_no_pair_of_a_and_b_on_an_unchanged_base_is_refused(settings, problem):
    section = LoraSection(r=2, **settings)
    model = load_policy(engine_recipe(model={"random_init": {"attention_bias": True}}).model, 0)
    with pytest.raises(RecipeError, match=f"model.lora{problem}"):
        LoraAdapters.attach(model, section, seed=0)


def test_settings_of_lora_without_a_rank_are_refused():
    with pytest.raises(RecipeError, match=r"model.lora.lora_alpha .* model.lora.r"):
        resolve_recipe([{"model": {"lora": {"lora_alpha": 16}}}])
