"""The engine on one rank: a plain twin, and everything that must change nothing but rounding."""

import math
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from core_engine import (
    ALL_AT_ONCE,
    ONE_BY_ONE,
    PlainTraining,
    engine_recipe,
    first_gradient,
    make_rows,
    open_engine,
    parameters,
    plain_logprobs,
    reference_statistics,
    relative,
    tiny_model,
    weighted,
)

import grpo_replay.engine.deepspeed_engine
import grpo_replay.engine.policy_module
from grpo_replay.engine.engine_state import ENGINE_TAG, MASTER, MOMENTS, read_saved_state
from grpo_replay.engine.models import load_policy
from grpo_replay.errors import NonFiniteError
from grpo_replay.recipe import LossSection

STAGES = [0, 1, 2, 3]
STATE = (MASTER, *MOMENTS)


def one_update(processes, rows, **sections):
    """(result, gradient, parameters) after one update."""
    with open_engine(processes, **sections) as engine:
        result = engine.update(rows)
        return result, first_gradient(engine), parameters(engine)


@pytest.mark.parametrize(("stage", "max_grad_norm", "beta"), [(3, 1e6, 0.1), (0, 0.05, 0.0)])
def test_updates_are_those_of_plain_torch(processes, stage, max_grad_norm, beta):
    sections = {
        "engine": {"zero_stage": stage},
        "optimizer": {"max_grad_norm": max_grad_norm},
        "loss": {"beta": beta},
    }
    plain = PlainTraining(engine_recipe(**sections))
    before = plain.parameters()
    with open_engine(processes, **sections) as engine:
        for seed in range(2):
            rows = make_rows(6, seed)
            result, (loss, norm) = engine.update(rows), plain.update(rows)
            # AdamW turns rounding of near-zero gradients into steps of full size.
            tolerance = 1e-5 if seed == 0 else 1e-4
            assert result.loss == pytest.approx(loss, rel=tolerance)
            assert result.grad_norm == pytest.approx(norm, rel=tolerance)
            assert norm > 0.05
            assert relative(parameters(engine), plain.parameters()) < tolerance / 10
    assert relative(plain.parameters(), before) > 1e-3


def test_outcomes_are_those_of_the_plain_model(processes):
    rows = make_rows(9)
    with open_engine(processes, batch={"max_tokens_per_microbatch": 60}) as engine:
        result = engine.update(rows)
    assert result.micro_batches > 2
    for row, outcome in zip(rows, result.outcomes, strict=True):
        expected = reference_statistics(row)
        for name, value in asdict(outcome).items():
            assert value == pytest.approx(expected[name], rel=5e-5, abs=1e-5), name


def test_one_micro_batch_of_eight_is_eight_micro_batches_of_one(processes):
    rows = make_rows(8)
    engine = {"zero_stage": 3}
    whole = one_update(processes, rows, engine=engine)
    parts = one_update(
        processes, rows, engine=engine, batch={"max_tokens_per_microbatch": ONE_BY_ONE}
    )
    assert (whole[0].micro_batches, parts[0].micro_batches) == (1, 8)
    lengths = [row.length_tokens for row in rows]
    assert whole[0].padding_share == pytest.approx(1 - sum(lengths) / (8 * max(lengths)))
    assert whole[0].padding_share > parts[0].padding_share == 0
    assert parts[0].loss == pytest.approx(whole[0].loss, rel=1e-6)
    assert parts[0].grad_norm == pytest.approx(whole[0].grad_norm, rel=1e-6)
    assert relative(parts[1], whole[1]) < 1e-6
    assert relative(parts[2], whole[2]) < 1e-6
    assert relative(whole[2], parameters_before()) > 1e-3


def parameters_before() -> torch.Tensor:
    named = dict(tiny_model().named_parameters())
    return torch.cat([named[name].detach().flatten() for name in sorted(named)])


def test_any_order_and_packing_give_the_same_update(processes):
    loss = {"aggregation": "constant"}
    rows = weighted(make_rows(16), LossSection(**loss))
    expected = one_update(processes, rows, loss=loss)
    for seed, budget in [(1, ALL_AT_ONCE), (2, 70)]:
        order = np.random.default_rng(seed).permutation(len(rows))
        found = one_update(
            processes,
            [rows[i] for i in order],
            loss=loss,
            batch={"max_tokens_per_microbatch": budget},
        )
        assert relative(found[1], expected[1]) < 1e-6
        assert relative(found[2], expected[2]) < 1e-6
        assert found[0].grad_norm == pytest.approx(expected[0].grad_norm, rel=1e-6)
        for position, i in enumerate(order):
            a, b = asdict(found[0].outcomes[position]), asdict(expected[0].outcomes[i])
            assert a == pytest.approx(b, rel=5e-5, abs=1e-5)


def test_all_zero_stages_agree(processes):
    rows = make_rows(12)
    results = [
        one_update(
            processes, rows, engine={"zero_stage": stage}, batch={"max_tokens_per_microbatch": 100}
        )
        for stage in STAGES
    ]
    for result, _, found in results[1:]:
        assert result.grad_norm == pytest.approx(results[0][0].grad_norm, rel=1e-6)
        assert result.loss == pytest.approx(results[0][0].loss, rel=1e-6)
        assert relative(found, results[0][2]) < 1e-6


class TorchAdamW:
    """torch's AdamW on fp32 copies of a model's parameters, with clip_grad_norm_."""

    def __init__(self, recipe) -> None:
        self.limit = recipe.optimizer.max_grad_norm
        named = load_policy(recipe.model, 0).named_parameters()
        self.masters = {name: p.detach().float().clone() for name, p in named}
        o = recipe.optimizer
        self.optimizer = torch.optim.AdamW(
            self.masters.values(), lr=o.learning_rate, betas=tuple(o.adamw.betas), eps=o.adamw.eps,
            weight_decay=o.adamw.weight_decay,
        )  # fmt: skip

    def update(self, gradients: dict[str, torch.Tensor]) -> float:
        for name, master in self.masters.items():
            master.grad = gradients[name].float()
        norm = torch.nn.utils.clip_grad_norm_(self.masters.values(), self.limit)
        self.optimizer.step()
        return float(norm)


def gradients_of_updates(engine) -> list[dict[str, torch.Tensor]]:
    """Filled with the gradients of each update that a ZeRO-0 engine makes, by name."""
    found, step = [], engine._engine.step

    def noting() -> None:
        named = engine._model.named_parameters()
        found.append({name: p.grad.clone() for name, p in named})
        step()

    engine._engine.step = noting
    return found


def test_every_zero_stage_makes_the_updates_of_torch_adamw(processes, tmp_path):
    """Several updates whose clip binds: weights, fp32 masters, moments and the update count that
    corrects their bias."""
    batches = [make_rows(6, seed) for seed in range(3)]
    sections = {
        "model": {"dtype": "bfloat16"},
        "optimizer": {"max_grad_norm": 0.05, "adamw": {"weight_decay": 0.1}},
    }  # fmt: skip
    plain = TorchAdamW(engine_recipe(**sections))
    for stage in STAGES:
        folder = tmp_path / str(stage)
        with open_engine(processes, **sections, engine={"zero_stage": stage}) as engine:
            gradients = gradients_of_updates(engine) if stage == 0 else []
            for rows in batches:
                norm = engine.update(rows).grad_norm
                assert norm > 0.1
                for each in gradients[-1:]:
                    assert plain.update(each) == pytest.approx(norm, rel=1e-5)
            engine.save(folder)
            names = [f"model.{name}" for name in plain.masters]  # within the policy module
            saved = read_saved_state(folder / ENGINE_TAG, names)
            weights = dict(engine.named_full_tensors(2**29))
            assert saved.step == 3
            for name, master in plain.masters.items():
                expected = {MASTER: master, **plain.optimizer.state[master]}
                found = {kind: saved.full(f"model.{name}", kind, master) for kind in STATE}
                for kind in STATE:
                    assert relative(found[kind], expected[kind]) < 1e-5, (stage, name, kind)
                assert torch.equal(weights[name], found[MASTER].to(weights[name].dtype))


def test_chunks_of_the_output_head_change_nothing(processes):
    rows, sampling = make_rows(8), {"temperature": 0.7}
    whole, chunks = (
        one_update(
            processes, rows, sampling=sampling,
            engine={"zero_stage": 3, "logprob_chunk_tokens": tokens},
        )
        for tokens in (4096, 7)
    )  # fmt: skip
    assert relative(chunks[1], whole[1]) < 1e-6
    assert relative(chunks[2], whole[2]) < 1e-6


def test_no_more_logits_exist_than_a_chunk_has_tokens(processes, monkeypatch):
    heights = []
    logits = grpo_replay.engine.policy_module._logits

    def watched(hidden_CH, *others):
        heights.append(len(hidden_CH))
        return logits(hidden_CH, *others)

    monkeypatch.setattr(grpo_replay.engine.policy_module, "_logits", watched)
    rows = make_rows(8)
    for trial in ("can_share", "refuse_length_dependence"):
        monkeypatch.setattr(grpo_replay.engine.deepspeed_engine, trial, lambda *_: False)
    one_update(processes, rows, engine={"logprob_chunk_tokens": 16})
    assert max(heights) == 16
    assert heights.pop(0) == 15  # the trial of the head
    # Every chunk is computed again in the backward pass.
    assert sum(heights) == 2 * sum(len(row.completion_token_ids) for row in rows)


def test_gradient_checkpointing_changes_nothing(processes):
    rows, engine = make_rows(8), {"zero_stage": 3}
    stored = one_update(processes, rows, engine=engine)
    model = {"gradient_checkpointing": True}
    recomputed = one_update(processes, rows, engine=engine, model=model)
    assert relative(recomputed[1], stored[1]) < 1e-6
    assert relative(recomputed[2], stored[2]) < 1e-6


@pytest.mark.parametrize("lora", [{}, {"lora": {"r": 4}}])
def test_only_adapters_ask_for_gradients_of_the_embeddings(processes, lora):
    """Else the first layer would be compiled apart."""
    with open_engine(processes, model={"gradient_checkpointing": True, **lora}) as engine:
        assert bool(engine._model.get_input_embeddings()._forward_hooks) == bool(lora)


def test_logprobs_are_those_of_plain_transformers(processes):
    rows, temperature = make_rows(10), 0.7
    with open_engine(
        processes,
        sampling={"temperature": temperature, "max_completion_length": 20},
        engine={"zero_stage": 3},
        batch={"max_tokens_per_microbatch": 120},
    ) as engine:
        found = engine.logprobs(rows)
    model = tiny_model()
    for row, logprobs_T in zip(rows, found, strict=True):
        with torch.no_grad():
            expected, _ = plain_logprobs(model, row, temperature)
        assert logprobs_T.dtype == np.float32
        assert np.abs(logprobs_T - expected.numpy()).max() < 2e-5


def test_temperature_scales_the_gradient_too(processes):
    rows = make_rows(4, temperature=0.7)
    sampling = {"temperature": 0.7, "max_completion_length": 20}
    result, gradient, _ = one_update(processes, rows, sampling=sampling)
    model = tiny_model()
    total = torch.zeros(())
    for row in rows:
        logprobs, _ = plain_logprobs(model, row, 0.7)
        ratios = torch.exp(logprobs - torch.from_numpy(row.behavior_logprobs))
        a = row.coefficient
        inside = torch.minimum(ratios * a, ratios.clamp(0.8, 1.28) * a)
        value = torch.maximum(inside, torch.tensor(10.0 * a)) if a < 0 else inside
        total = total - row.token_weight * value.sum()
    total.backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert relative(gradient, expected) < 5e-6
    assert result.loss == pytest.approx(total.item(), rel=1e-5, abs=1e-6)


def test_an_empty_completion_takes_part_without_tokens(processes):
    rows = make_rows(3)
    nothing = np.zeros(0, np.float32)
    empty = replace(
        rows[0],
        completion_token_ids=np.zeros(0, np.int32),
        behavior_logprobs=nothing,
        reference_logprobs=nothing,
    )
    for budget in (ALL_AT_ONCE, ONE_BY_ONE):
        batch = {"max_tokens_per_microbatch": budget}
        with_it = one_update(processes, [*rows, empty], batch=batch)
        without = one_update(processes, rows, batch=batch)
        assert relative(with_it[1], without[1]) < 1e-6
        assert asdict(with_it[0].outcomes[3]) == {
            "tokens": 0, "clip_fraction": 0.0, "log_ratio_mean": 0.0, "log_ratio_var": 0.0,
            "approx_kl": 0.0, "ratio_mean": 0.0, "ratio_squared_mean": 0.0, "ratio_max": 0.0,
            "entropy": 0.0,
        }  # fmt: skip
        with open_engine(processes, batch=batch) as engine:
            found = engine.logprobs([empty, *rows])
        assert [len(values) for values in found] == [0, *(len(r.behavior_logprobs) for r in rows)]


def test_the_reference_stays_where_it_was_while_the_policy_moves(processes):
    """Both at the temperature of the recipe."""
    rows = make_rows(6)
    sampling = {"temperature": 0.7, "max_completion_length": 20}
    sections = {"loss": {"beta": 0.1}, "engine": {"zero_stage": 3}, "sampling": sampling}
    with open_engine(processes, **sections) as engine:
        before = engine.reference_logprobs(rows)
        policy_before = engine.logprobs(rows)
        first = engine.update(rows)
        second = engine.update(rows)
        after, policy_after = engine.reference_logprobs(rows), engine.logprobs(rows)
    for a, b, c, d in zip(before, after, policy_before, policy_after, strict=True):
        assert a.tobytes() == b.tobytes()
        assert np.abs(a - c).max() < 1e-5
        assert np.abs(c - d).max() > 1e-4
    assert first.reference_kl > 0
    assert second.reference_kl != first.reference_kl


def test_log_probs_of_a_fresh_rollout_give_ratio_one_before_any_update(processes):
    """Re-packed with other rows, in fp32: 2e-5 covers what re-padding costs."""
    rows = make_rows(20)
    with open_engine(processes, batch={"max_tokens_per_microbatch": 200}) as engine:
        behavior = engine.logprobs(rows)
        frozen = [replace(row, behavior_logprobs=b) for row, b in zip(rows, behavior, strict=True)]
        result = engine.update(frozen[::-1])
    for outcome in result.outcomes:
        assert abs(outcome.ratio_max - 1) < 2e-5
        assert abs(outcome.ratio_mean - 1) < 2e-5
        assert outcome.clip_fraction == 0


@pytest.mark.parametrize(("stage", "dtype"), [(3, "float32"), (0, "bfloat16")])
def test_a_non_finite_loss_stops_before_the_step(processes, stage, dtype):
    rows = make_rows(5)
    poisoned = rows[3].behavior_logprobs.copy()
    poisoned[0] = np.nan
    rows[3] = replace(rows[3], behavior_logprobs=poisoned, rollout_id=72)
    sections = {"engine": {"zero_stage": stage}, "model": {"dtype": dtype}}
    with open_engine(processes, **sections) as engine:
        before = parameters(engine)
        with pytest.raises(NonFiniteError, match="rollout_id 72 first"):
            engine.update(rows)
        assert torch.equal(parameters(engine), before)


@pytest.mark.parametrize(
    ("stage", "dtype", "bad"),
    [(3, "float32", math.nan), (0, "float32", math.inf), (0, "bfloat16", math.inf)],
)
def test_a_non_finite_gradient_of_a_finite_loss_stops_the_run(processes, stage, dtype, bad):
    model = tiny_model().to(getattr(torch, dtype))

    def poison(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[0] = bad
        return gradient

    query = next(p for name, p in model.named_parameters() if "q_proj" in name)
    handle = query.register_hook(poison)
    sections = {"engine": {"zero_stage": stage}, "model": {"dtype": dtype}}
    with open_engine(processes, model, **sections) as engine:
        with pytest.raises(NonFiniteError, match="gradient norm"):
            engine.update(make_rows(3))
        handle.remove()


@pytest.mark.slow
def test_bf16_gradients_of_many_micro_batches_add_up(processes):
    """300 equal micro-batches: a bf16 sum stops growing at 256 times its summand."""
    (row,) = make_rows(1)
    bf16 = {"model": {"dtype": "bfloat16"}, "engine": {"zero_stage": 2}}
    whole = one_update(processes, [replace(row, token_weight=1.0)], **bf16)
    rows = [replace(row, token_weight=1 / 300)] * 300
    parts = one_update(processes, rows, **bf16, batch={"max_tokens_per_microbatch": ONE_BY_ONE})
    assert parts[0].micro_batches == 300
    assert relative(parts[1], whole[1]) < 0.01
    assert parts[0].grad_norm == pytest.approx(whole[0].grad_norm, rel=0.01)


@pytest.mark.parametrize(("stage", "packing"), [(0, False), (3, True)])
def test_saved_and_loaded_is_never_saved(processes, stage, packing, tmp_path):
    """Also where the engine, when it opens, tries out whether the model's rows can be packed."""
    first, second = make_rows(6, 1), make_rows(6, 2)
    sections = {"engine": {"zero_stage": stage}, "batch": {"packing": packing}}
    with open_engine(processes, **sections) as engine:
        engine.update(first)
        engine.save(tmp_path / "engine")
        expected = (engine.update(second), parameters(engine))
    with open_engine(processes, **sections) as engine:
        engine.load(tmp_path / "engine")
        found = (engine.update(second), parameters(engine))
    assert asdict(found[0]) == asdict(expected[0])
    assert torch.equal(found[1], expected[1])


def test_full_tensors_come_under_every_tied_name_in_buckets(processes):
    with open_engine(processes, engine={"zero_stage": 3}) as engine:
        whole = {name: t.clone() for name, t in engine.named_full_tensors(2**29)}
        parts = {name: t.clone() for name, t in engine.named_full_tensors(1000)}
    assert whole.keys() == parts.keys()
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= whole.keys()
    state = tiny_model().state_dict()
    assert whole.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(whole[name], tensor), name
        assert torch.equal(parts[name], tensor), name
