"""A saved state is restored in a changed run: other stage, dtype, offload, model."""

import json
import shutil

import pytest
import torch
from core_engine import SCALED, make_rows, open_engine, parameters, relative

from grpo_replay.engine.engine_state import ENGINE_TAG, LAYOUT
from grpo_replay.errors import CheckpointError

OTHER_MODELS: tuple[dict[str, int], ...] = (
    {"intermediate_size": 64},
    {"num_hidden_layers": 1},
    {"num_hidden_layers": 4},
)


@pytest.fixture(scope="module")
def rows():
    return make_rows(4)


def engine_at(processes, stage, *, dtype="float32", config=None, **engine):
    """With small sub-groups, so that ZeRO-3 has several of them."""
    return open_engine(
        processes,
        engine={**SCALED, "zero_stage": stage, **engine},
        model={"dtype": dtype} | (config or {}),
    )


def make_layout_foreign(folder) -> None:
    """So that the state is read as one of another layout is."""
    layout = json.loads((folder / LAYOUT).read_text())
    (folder / LAYOUT).write_text(json.dumps(layout | {"ranks": 99}))


def test_an_engine_at_zero_3_opens_with_no_gathered_parameter(processes):
    """A state that is loaded next would be overwritten by them."""
    with open_engine(processes, engine={"zero_stage": 3}) as engine:
        gathered = [p for p in engine._model.parameters() if p.ds_status.name != "NOT_AVAILABLE"]
        assert not gathered


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "other"), [(0, 3), (1, 2), (3, 1)])
def test_a_state_from_before_the_first_update_is_restored(processes, rows, tmp_path, stage, other):
    with engine_at(processes, stage) as engine:
        engine.save(tmp_path)
        updates = [engine.update(rows) for _ in range(2)]
        expected = parameters(engine)
    make_layout_foreign(tmp_path)
    with engine_at(processes, other) as engine:
        engine.load(tmp_path)
        losses = [engine.update(rows).loss for _ in range(2)]
        assert relative(parameters(engine), expected) < 1e-6
    assert losses == pytest.approx([update.loss for update in updates], rel=1e-5)


@pytest.mark.parametrize(("saved", "loaded"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_another_dtype_keeps_the_fp32_values_and_moments(processes, rows, tmp_path, saved, loaded):
    """There and back again, the state is the one that was saved."""
    stage, other = 0, 2
    with engine_at(processes, stage, dtype=saved) as engine:
        for _ in range(2):
            engine.update(rows)
        engine.save(tmp_path / "first")
        saved_parameters = parameters(engine)
        expected = engine.update(rows).grad_norm, parameters(engine)
    with engine_at(processes, other, dtype=loaded) as engine:
        engine.load(tmp_path / "first")
        assert relative(parameters(engine), saved_parameters) < 3e-3  # bfloat16's rounding
        engine.save(tmp_path / "back")
    with engine_at(processes, stage, dtype=saved) as engine:
        engine.load(tmp_path / "back")
        assert torch.equal(parameters(engine), saved_parameters)
        assert engine.update(rows).grad_norm == pytest.approx(expected[0], rel=1e-6)
        assert relative(parameters(engine), expected[1]) < 1e-6


@pytest.mark.parametrize(
    ("saved", "other", "loaded"), [("optimizer", 3, "nothing"), ("nothing", 2, "optimizer")]
)
def test_a_state_moves_to_and_from_an_offloaded_optimizer(
    processes, rows, tmp_path, saved, other, loaded
):
    with engine_at(processes, 2, offload=saved) as engine:
        engine.update(rows)
        engine.save(tmp_path)
        engine.update(rows)
        expected = parameters(engine)
    with engine_at(processes, other, offload=loaded) as engine:
        engine.load(tmp_path)
        engine.update(rows)
        assert relative(parameters(engine), expected) < 1e-7


@pytest.mark.parametrize("stage", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_a_state_of_another_model_is_refused(processes, tmp_path, stage):
    """Larger, smaller, or with other layers: never cut or padded to fit."""
    with engine_at(processes, stage) as engine:
        engine.save(tmp_path)
    make_layout_foreign(tmp_path)
    for override in OTHER_MODELS:
        config = {"random_init": override}
        with (
            engine_at(processes, stage, config=config) as engine,
            pytest.raises(CheckpointError, match="the engine state is of another model"),
        ):
            engine.load(tmp_path)


def test_a_missing_shard_or_layout_is_named(processes, tmp_path):
    with engine_at(processes, 3) as engine:
        engine.save(tmp_path)
        shard = next((tmp_path / ENGINE_TAG).glob("*optim_states.pt"))
        shutil.copy(shard, shard.with_name(shard.name.replace("rank_0", "rank_1")))
        make_layout_foreign(tmp_path)
        with pytest.raises(CheckpointError, match=r"2 files \*optim_states.pt of the 1 ranks"):
            engine.load(tmp_path)
        (tmp_path / LAYOUT).unlink()
        with pytest.raises(CheckpointError, match=r"layout.json is missing"):
            engine.load(tmp_path)
