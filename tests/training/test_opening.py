"""Steps of opening a run that only long runs take: by hand."""

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_runs.asynchronous import ASYNCHRONOUS

from grpo_replay.distributed.comm import Comm
from grpo_replay.errors import ModelError, RecipeError
from grpo_replay.recipe import resolve_recipe
from grpo_replay.storage.checkpoint import RunState
from grpo_replay.storage.run_directory import RunDirectory
from grpo_replay.training import Observer, opening, reward_watch
from grpo_replay.training.opening import RunOpener
from grpo_replay.training.resuming import StartingPoint, open_other_logs


def opener(folder: Path, **sections) -> RunOpener:
    """Of one rank, with an observer that writes down what it is told."""
    observer, told = Observer(), []
    observer.on_status, observer.told = told.append, told
    device = SimpleNamespace(type="cpu")
    recipe = resolve_recipe([sections])
    return RunOpener(recipe, Comm(), device, RunDirectory(folder), observer, ExitStack())


@pytest.mark.parametrize("resumed", [False, True])
def test_vllm_opens_a_random_model_from_the_folder_of_its_first_weights(tmp_path, resumed):
    sections = {
        "model": {"path": "builtin:qwen3-0.6b", "random_init": True, "tokenizer": "builtin:bytes"},
        "sampling": {"backend": "vllm"},
    }
    saved: list[Path] = []
    engine = SimpleNamespace(save_model=saved.append)
    folder = tmp_path / "initial_model"
    assert opener(tmp_path, **sections)._model_path(engine, resumed) == str(folder)
    assert saved.pop() == folder and saved == []
    folder.mkdir()  # left by an attempt that was cut off, or there since the run began
    assert opener(tmp_path, **sections)._model_path(engine, resumed) == str(folder)
    assert saved == ([] if resumed else [folder])


@pytest.mark.parametrize(("rank", "logs"), [(0, []), (2, ["attempt_004.rank_2.log"])])
def test_every_other_rank_logs_beside_rank_0(tmp_path, rank, logs):
    """Three attempts were logged before; rank 0 has opened the fourth."""
    folder = tmp_path / "log"
    folder.mkdir()
    for attempt in range(1, 5):
        (folder / f"attempt_{attempt:03d}.log").touch()
    comm = SimpleNamespace(
        rank=rank, is_main=rank == 0,
        broadcast_json=lambda value=None: 4 if value is None else value,
        all_gather_json=lambda value: [value],
    )  # fmt: skip
    open_other_logs(RunDirectory(tmp_path), comm)
    assert sorted(path.name for path in folder.glob("*rank*")) == logs


def test_a_sampler_in_the_trainers_process_reads_no_model_and_a_trained_one_has_its_own_folder(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(opening, "resolve_model_path", lambda path: f"found {path}")
    model = {"path": "builtin:qwen3-0.6b", "random_init": True, "tokenizer": "builtin:bytes"}
    assert opener(tmp_path, model=model)._model_path(None, False) == "builtin:qwen3-0.6b"
    assert opener(tmp_path, model={"path": "some/model"})._model_path(None, False) == (
        "found some/model"
    )


@pytest.mark.parametrize(
    ("ranks", "stage", "told"),
    [
        (1, 2, []),
        (3, 2, ["restoring the engine state of 3 ranks at ZeRO 2 on 1 at ZeRO 2"]),
        (1, 0, ["restoring the engine state of 1 ranks at ZeRO 0 on 1 at ZeRO 2"]),
    ],
)
def test_an_engine_state_of_other_ranks_or_another_stage_is_named(tmp_path, ranks, stage, told):
    opened = opener(tmp_path, engine={"zero_stage": 2})
    opened._say_if_resharded(RunState(world_size=ranks, zero_stage=stage))
    assert opened.observer.told == told


@pytest.mark.parametrize("restore", [True, False])
def test_the_buffer_of_a_checkpoint_is_restored_unless_the_recipe_empties_it(
    tmp_path, monkeypatch, restore
):
    restored = []
    monkeypatch.setattr(opening, "restore_buffer", lambda *words: restored.append(words))
    opened = opener(tmp_path, checkpoint={"restore_buffer": restore})
    opened._restore_buffer(StartingPoint(None), "buffer")
    assert (restored, opened.notices) == ([], [])
    opened._restore_buffer(StartingPoint(tmp_path, RunState(step=4)), "buffer")
    empties = "checkpoint.restore_buffer is false: the replay buffer starts empty"
    assert restored == ([(tmp_path, 4, "buffer")] if restore else [])
    assert opened.notices == ([] if restore else [empties])


class Prompts:
    """Ten that remain, the longest of 21 tokens."""

    longest_prompt, notices = 21, ["of the prompts"]

    def __len__(self) -> int:
        return 10

    def notices_of_use(self, per_step: int, held_out: set[str]) -> list[str]:
        return [f"{per_step} a step", *sorted(held_out)]


def test_prompts_are_those_of_the_recipe_have_room_and_say_what_was_noticed(tmp_path, monkeypatch):
    asked, rooms = [], []
    monkeypatch.setattr(opening, "load_prompts", lambda *words: asked.append(words) or Prompts())
    monkeypatch.setattr(opening, "check_room", lambda *words: rooms.append(words))
    opened = opener(tmp_path, prompts={"max_prompt_length": 30}, run={"seed": 8})
    recipe = opened.recipe
    assert len(opened._load_prompts("tokenizer")) == 10
    assert asked == [(recipe.prompts, "tokenizer", 8, recipe.reward.reads_rows)]
    assert rooms == [(recipe, 21)]
    assert opened.notices == ["of the prompts"]


@pytest.mark.parametrize(
    ("known", "told", "kept"),
    [
        ({}, 0, {"4": "new"}),  # by an earlier version
        ({"1": "old"}, 1, {"1": "old", "4": "new"}),
        ({"1": "old", "3": "new"}, 0, {"1": "old", "3": "new"}),
        ({"1": "new", "3": "old"}, 1, {"1": "new", "3": "old", "4": "new"}),
    ],
)
def test_other_prompts_than_before_are_noticed_and_remembered(tmp_path, known, told, kept):
    opened, state = opener(tmp_path), RunState(step=3, prompts=known)
    opened._remember_prompts(SimpleNamespace(sha256="new"), state)
    assert [each[:42] for each in opened.notices] == [
        "the prompts are others than before step 4:"
    ] * told
    assert state.prompts == kept
    assert state.prompts_at(4) == "new"


def test_another_model_than_the_run_began_with_is_refused(tmp_path):
    opened = opener(tmp_path)
    for recorded in ("", "the base"):  # none by an earlier version
        state = RunState(base=recorded)
        opened._remember_base("the base", state)
        assert state.base == "the base"
    with pytest.raises(ModelError, match=r"builtin:tiny' is another model than the one that the"):
        opened._remember_base("another", state)


@pytest.mark.parametrize("evaluated", [True, False])
def test_what_is_noticed_of_the_rewards_is_said_once(tmp_path, monkeypatch, evaluated):
    monkeypatch.setattr(opening, "notices_of_workers", lambda *words: [f"workers {words}"])
    monkeypatch.setattr(opening, "notices_of_rewards", lambda *_: ["odd function"])
    monkeypatch.setattr(
        opening, "notices_of_verifier", lambda name, *_: ["odd function", f"verifier {name}"]
    )
    opened = opener(tmp_path, reward={"workers": 3}, sampling={"prompts_per_step": 7})
    plan = SimpleNamespace(problem_texts={"1+1"}) if evaluated else None
    opened._try_rewards("scorer", Prompts(), plan)
    verifier = f"verifier {opened.recipe.eval.reward}"
    of_evaluation = [["1+1"], [verifier]] if evaluated else [[], []]
    assert opened.notices == [
        "7 a step", *of_evaluation[0], "workers (3, 1)", "odd function", *of_evaluation[1],
    ]  # fmt: skip


@pytest.mark.parametrize("is_main", [True, False])
def test_the_limits_of_a_run_are_noticed(tmp_path, monkeypatch, is_main):
    asked = []
    monkeypatch.setattr(opening, "load_config", lambda model: "config")
    monkeypatch.setattr(opening, "float32_warning", lambda *words: asked.append(words) or "large")
    monkeypatch.setattr(opening, "notices_of_room", lambda *words: asked.append(words) or ["full"])
    monkeypatch.setattr(opening, "notices_of_precision", lambda *words: [f"precision {words}"])
    opened = opener(
        tmp_path, prompts={"max_prompt_length": 100}, sampling={"max_completion_length": 50},
        batch={"max_tokens_per_microbatch": 1000}, checkpoint={"keep": 4}, engine={"zero_stage": 2},
    )  # fmt: skip
    opened.checkpoint_bytes = 77
    if not is_main:
        opened.comm.rank = 1
    opened._note_limits()
    room = (opened.run_dir.checkpoints, 4, 77)
    assert asked == [(opened.recipe.model, "config", 150, False), room][: 1 + is_main]
    precision = f"precision {(opened.recipe.model.dtype, 2)}"
    assert opened.notices == ["large", *["full"][: int(is_main)], precision]
    monkeypatch.setattr(opening, "float32_warning", lambda *_: "")
    opened.notices.clear()
    opened._note_limits()
    assert opened.notices[-1] == precision and "large" not in opened.notices


def test_the_tokens_that_end_a_completion_are_named():
    sampler = SimpleNamespace(stop_token_ids=(2, 9))
    tokenizer = SimpleNamespace(convert_ids_to_tokens=lambda ids: [f"<{each}>" for each in ids])
    assert opening._describe_stop_tokens(sampler, tokenizer) == (
        "completions end at <2> (2) or <9> (9); sampling.stop_tokens chooses others"
    )


def test_nothing_is_planned_without_benchmarks(tmp_path, monkeypatch):
    monkeypatch.setattr(opening, "plan_that_fits", lambda tokenizer, recipe: f"with {tokenizer}")
    assert opener(tmp_path, eval={"benchmarks": []})._plan_evaluation("words") is None
    assert opener(tmp_path, eval={"benchmarks": ["aime24"]})._plan_evaluation("words") == (
        "with words"
    )


class Told(list):
    """Writes down what is done with it."""

    def __getattr__(self, name: str):
        return lambda *words: self.append((name, *words))


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_opens_its_parts_in_this_order(tmp_path, monkeypatch, resume):
    """What a wrong recipe names is refused before anything is created, a resume removes what comes
    after its checkpoint last of all."""
    done = Told()
    opened = opener(tmp_path, engine={"zero_stage": 2})
    recipe, comm = opened.recipe, opened.comm
    start = StartingPoint(None, RunState(step=3), ["of the start"])
    monkeypatch.setattr(
        opening, "take_directory", lambda *words: done.take_directory(*words) or start
    )
    monkeypatch.setattr(opening, "load_tokenizer", lambda model: "words")
    monkeypatch.setattr(opening, "open_source", lambda *words: "source")
    monkeypatch.setattr(opening, "go_back", lambda *words: done.go_back(*words) or ["of going"])
    monkeypatch.setattr(comm.position, "note", done.note)
    for name, part in [
        ("load_named_functions", None), ("open_scorer", "scorer"), ("load_prompts", "prompts"),
        ("remember_prompts", None), ("plan_evaluation", "plan"),
        ("try_rewards", None), ("open_engine", "engine"),
        ("note_limits", None), ("open_sampler", "sampler"), ("restore_buffer", None),
    ]:  # fmt: skip
        step = lambda *words, name=name, part=part: done.append((name, *words)) or part  # noqa: E731
        monkeypatch.setattr(opened, f"_{name}", step)
    opened.checkpoint_bytes = 77
    found = opened.open(resume)
    buffer = found.parts.buffer
    assert done == [
        ("load_named_functions",),
        ("take_directory", recipe, opened.run_dir, comm, resume, opened.stack),
        ("open_scorer", start),
        ("note", "prompts"), ("load_prompts", "words"),
        ("remember_prompts", "prompts", start.state), ("plan_evaluation", "words"),
        ("note", "rewards"), ("try_rewards", "scorer", "prompts", "plan"),
        ("note", "engine"), ("open_engine", start, "words"), ("note_limits",),
        ("note", "sampler"), ("open_sampler", start, "engine", "words"),
        ("restore_buffer", start, buffer),
        *[("go_back", recipe, opened.run_dir, start)] * resume,
    ]  # fmt: skip
    assert found.notices == ["of the start", *["of going"] * resume]
    assert (found.state, found.source, found.evaluation) == (start.state, "source", "plan")
    assert found.checkpoint_bytes == 77
    assert (start.state.world_size, start.state.zero_stage) == (1, 2)
    assert (buffer.settings, buffer.group_size) == (recipe.replay, recipe.sampling.group_size)
    parts = found.parts
    assert (parts.engine, parts.sampler, parts.scorer, parts.tokenizer) == (
        "engine", "sampler", "scorer", "words",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"replay": {"priority": "no_such:f"}}, "replay.priority"),
        ({"advantage": {"estimator": "no_such:f"}}, "advantage.estimator"),
        ({"loss": {"kind": "no_such:f"}}, "loss.kind"),
    ],
)
def test_functions_that_are_not_there_are_refused_first(tmp_path, section, message):
    with pytest.raises(RecipeError, match=message):
        opener(tmp_path, **section)._load_named_functions()
    opener(tmp_path)._load_named_functions()


SERVER = {"servers": {"urls": ["http://a:1"]}}
LIVE = ASYNCHRONOUS | {"sampling": ASYNCHRONOUS["sampling"] | SERVER}


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize(
    ("section", "kept"),
    [({}, True), ({"replay": {"preset": "grpo"}}, False),
     ({"checkpoint": {"restore_buffer": False}}, False), (LIVE, True)],
)  # fmt: skip
def test_the_rewards_are_compared_with_those_of_the_checkpoint(
    tmp_path, monkeypatch, given, section, kept
):
    """The scorer of the caller is used, and not closed."""
    done = Told()

    class Scorer:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self):
            return self

        def __exit__(self, *_) -> None:
            done.close(self.name)

        def sources(self):
            return {"f": "1"}

    monkeypatch.setattr(opening.RewardScorer, "open", lambda reward: Scorer("own"))
    monkeypatch.setattr(opening, "reward_facts", lambda reward, sources: {"now": sources})
    monkeypatch.setattr(
        reward_watch, "changes_of_reward", lambda *words: done.compared(*words) or changes
    )
    monkeypatch.setattr(reward_watch, "count_stored", lambda path: done.counted(path) or 0)
    changes = ["it changed"]
    opened = opener(tmp_path, **section)
    opened.scorer = Scorer("given") if given else None
    state = RunState(step=7, reward={"before": 1})
    new = StartingPoint(None, RunState())
    assert opened._open_scorer(new).name == ("given" if given else "own")
    assert (done, opened.notices, new.state.reward) == ([], [], {"now": {"f": "1"}})
    checkpoint = tmp_path / "step_000007"
    opened._open_scorer(StartingPoint(checkpoint, state))
    counted = [("counted", checkpoint / "buffer.parquet")] if kept else []
    assert done == [("compared", {"before": 1}, {"now": {"f": "1"}}), *counted]
    said = "the reward is another than before step 8: it changed"
    rest = ["groups that arrived before keep the rewards that they were given"]
    rest = rest if opened.recipe.run.is_async else []
    assert (opened.notices, state.reward) == ([said, *rest], {"now": {"f": "1"}})
    changes.clear()
    done.clear()
    opened.notices.clear()
    opened._open_scorer(StartingPoint(checkpoint, state))
    assert opened.notices == [] and done.pop()[0] == "compared"
    opened.stack.close()
    assert done == ([] if given else [("close", "own")] * 3)


@pytest.mark.parametrize("adapters", [0, 2500])
@pytest.mark.parametrize("resumed", [False, True])
def test_the_engine_is_closed_with_the_run_and_loads_its_checkpoint(
    tmp_path, monkeypatch, adapters, resumed
):
    done = Told()
    model = torch.nn.Linear(1000, 3, bias=False)
    model.dtype = torch.bfloat16
    engine = SimpleNamespace(
        notices=["of the engine"], adapter_parameters=adapters, load=done.load, close=done.close
    )
    made = []
    monkeypatch.setattr(opening, "refuse_other_shapes", lambda *_: None)
    monkeypatch.setattr(opening, "load_policy", lambda *words: done.load_policy(*words) or model)
    monkeypatch.setattr(opening, "drop_unwritable_settings", lambda _: ["dropped"])
    monkeypatch.setattr(opening, "DeepSpeedEngine", lambda *words: made.append(words) or engine)
    monkeypatch.setattr(opening, "checkpoint_bytes", lambda *words: words)
    opened = opener(tmp_path, engine={"zero_stage": 2}, model={"path": "some/model"})
    start = StartingPoint(tmp_path if resumed else None, RunState(world_size=4, zero_stage=2))
    assert opened._open_engine(start, "words") is engine
    assert made == [(opened.recipe, model, "words", opened.comm, opened.device)]
    assert done[0] == ("load_policy", opened.recipe.model, opened.recipe.run.seed)
    assert done[1:] == [("load", tmp_path / "engine")] * resumed
    assert len(opened.observer.told) == resumed
    assert opened.checkpoint_bytes == (3000, 2, 2, adapters)
    lora = "LoRA: 2,500 parameters of adapters train, the 3,000 of some/model are frozen"
    assert opened.notices == ["dropped", "of the engine", *[lora] * bool(adapters)]
    opened.stack.close()
    assert done[-1] == ("close",)


@pytest.mark.parametrize("resumed", [False, True])
def test_the_sampler_is_closed_with_the_run(tmp_path, monkeypatch, resumed):
    done = Told()
    sampler = SimpleNamespace(close=done.close)
    opened = opener(tmp_path)
    monkeypatch.setattr(
        opening, "open_sampler", lambda *words: done.open_sampler(*words) or sampler
    )
    monkeypatch.setattr(opening, "_describe_stop_tokens", lambda *words: f"ends of {words[1]}")
    monkeypatch.setattr(opened, "_model_path", lambda engine, resumed: f"{engine} {resumed}")
    start = StartingPoint(tmp_path if resumed else None)
    assert opened._open_sampler(start, "engine", "words") is sampler
    assert done == [
        ("open_sampler", opened.recipe, f"engine {resumed}", opened.comm, tmp_path / "log")
    ]
    assert opened.notices == ["ends of words"]
    opened.stack.close()
    assert done[-1] == ("close",)
