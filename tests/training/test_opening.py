"""Steps of opening a run that only long runs take: by hand."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from grpo_replay.recipe import resolve_recipe
from grpo_replay.training import opening
from grpo_replay.training.opening import RunOpener


def opener(folder: Path, **sections) -> SimpleNamespace:
    return SimpleNamespace(
        recipe=resolve_recipe([sections]), run_dir=SimpleNamespace(path=folder), notices=[]
    )


@pytest.mark.parametrize("resumed", [False, True])
def test_vllm_opens_a_random_model_from_the_folder_of_its_first_weights(tmp_path, resumed):
    sections = {
        "model": {"path": "builtin:qwen3-0.6b", "random_init": True, "tokenizer": "builtin:bytes"},
        "sampling": {"backend": "vllm"},
    }
    saved: list[Path] = []
    engine = SimpleNamespace(save_model=saved.append)
    folder = tmp_path / "initial_model"
    if resumed:
        folder.mkdir()
    found = RunOpener._model_path(opener(tmp_path, **sections), engine, resumed)
    assert (found, saved) == (str(folder), [] if resumed else [folder])


def test_a_lagging_sampler_gets_the_weights_it_had_at_the_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(opening, "read_pushed_weights", lambda _: ({"w": 1.0}, 3))
    monkeypatch.setattr(opening, "sync_weights", lambda *_: pytest.fail("it got the policy"))
    loaded = []
    sampler = SimpleNamespace(load_weights=lambda tensors, v: loaded.append((list(tensors), v)))
    lagging = opener(tmp_path, run={"sync_every_steps": 2}, loss={"behavior_logprobs": "sampler"})
    RunOpener._restore_sampler(lagging, tmp_path, SimpleNamespace(), sampler, None, 4)
    assert loaded == [([("w", 1.0)], 3)]


def test_a_sampler_in_step_gets_the_policy(tmp_path, monkeypatch):
    pushed = []
    monkeypatch.setattr(opening, "read_pushed_weights", lambda _: pytest.fail("it does not lag"))
    monkeypatch.setattr(opening, "sync_weights", lambda *words: pushed.append(words))
    engine, sampler = SimpleNamespace(), SimpleNamespace()
    RunOpener._restore_sampler(opener(tmp_path), tmp_path, engine, sampler, None, 4)
    (words,) = pushed
    assert words[:3] == (engine, sampler, 4)
