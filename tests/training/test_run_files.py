"""One small run of the real thing, and everything it promises to leave behind."""

import json
from itertools import pairwise
from math import ceil

import pyarrow.parquet as pq
import pytest
import yaml
from small_runs.trained import Listener, small_recipe, train_small_run
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_replay.cli.run_display import samples_table, shortened
from grpo_replay.engine.models import load_tokenizer
from grpo_replay.errors import RecipeError
from grpo_replay.evaluation.evaluation_report import read_report
from grpo_replay.recipe import ModelSection, load_recipe, resolve_recipe
from grpo_replay.sampling.hf import HfSampler
from grpo_replay.training import run as run_module
from grpo_replay.training.run import run_training

SETTINGS = [
    "run.steps=5",
    "reward.function=minerva",
    "reward.workers=1",
    "sampling.prompts_per_step=8",
    "sampling.group_size=4",
    "sampling.stop_tokens=['}']",
    "batch.mini_batch_rollouts=14",
    "replay.warmup_steps=1",
    "replay.max_age_steps=2",
    "replay.capacity_rollouts=32",
    "checkpoint.every_steps=2",
    "checkpoint.keep=2",
    "eval.every_steps=3",
    "eval.samples=1",
    "eval.max_problems=10",
]


class Watcher(Listener):
    """Keeps also what the sampler is told to do."""

    def __init__(self) -> None:
        super().__init__()
        self.told_sampler = []

    def noted(self, name: str):
        """The sampler's method, which says that it was called."""
        honest = getattr(HfSampler, name)

        def call(sampler, *arguments, **options):
            kept = options.get("keep_weights")
            self.told_sampler.append((name, kept) if name == "sleep" else name)
            return honest(sampler, *arguments, **options)

        return call


@pytest.fixture(scope="module")
def watcher() -> Watcher:
    return Watcher()


@pytest.fixture(scope="module")
def run(tmp_path_factory, watcher, processes):
    path = tmp_path_factory.mktemp("run") / "tiny"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "SAMPLES_EVERY_STEPS", 2)
        for name in ("generate", "sleep", "load_weights"):
            patch.setattr(HfSampler, name, watcher.noted(name))
        assert not run_training(load_recipe("tiny", SETTINGS), path, False, watcher).interrupted
    return path


def metrics_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_the_directory_holds_what_the_design_says(run):
    steps = [f"step_{step:06d}.parquet" for step in range(1, 6)]
    assert sorted(path.name for path in (run / "rollouts").iterdir()) == steps
    assert sorted(path.name for path in (run / "draws").iterdir()) == steps
    reports = sorted(path.name for path in (run / "eval").glob("*.json"))
    assert reports == ["step_000000.json", "step_000003.json", "step_000005.json"]
    checkpoints = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert checkpoints == ["latest", "step_000004", "step_000005"]
    assert (run / "checkpoints/latest").resolve().name == "step_000005"
    parts = {path.name for path in (run / "checkpoints/latest").iterdir()}
    assert parts == {"model", "engine", "buffer.parquet", "state.json", "manifest.json"}
    assert [path.name for path in (run / "log").iterdir()] == ["attempt_001.log"]
    environment = json.loads((run / "environment.json").read_text())
    assert environment["packages"]["torch"] and environment["world_size"] == 1
    recipe = resolve_recipe([yaml.safe_load((run / "recipe.yaml").read_text())])
    assert recipe == load_recipe("tiny", SETTINGS)


def test_a_list_of_steps_says_when_to_evaluate_and_the_last_step_is_evaluated_too(
    tmp_path, processes
):
    evaluated = {"benchmarks": ["tiny_add"], "max_problems": 4, "samples": 1}
    run = train_small_run(
        tmp_path / "run", run={"steps": 4}, eval={**evaluated, "every_steps": [1, 3]}
    )
    steps = sorted(path.stem for path in (run.path / "eval").glob("*.json"))
    assert steps == ["step_000000", "step_000001", "step_000003", "step_000004"]
    for wrong in ([], [0, 3], [3, 3]):
        with pytest.raises(RecipeError, match=r"eval\.every_steps"):
            small_recipe(eval={**evaluated, "every_steps": wrong})


def test_mini_batches_of_a_literal_size_are_as_many_as_the_batch_needs(run):
    rows = metrics_of(run)
    for row in rows:
        assert row["updates"] == ceil(row["cost/trained_rollouts"] / 14)
    assert {row["updates"] for row in rows} > {1}


def test_completions_end_at_the_recipe_s_stop_token_and_evaluations_say_so(run):
    brace = load_tokenizer(ModelSection()).convert_tokens_to_ids("}")
    rows = pq.read_table(run / "rollouts/step_000005.parquet").to_pylist()
    ends = [row["completion_token_ids"][-1] for row in rows if row["finish_reason"] == "stop"]
    assert len(ends) > 20 and set(ends) == {brace}
    assert f"}} ({brace})" in (run / "log/attempt_001.log").read_text()
    report = read_report(run / "eval/step_000005.json")
    assert report.settings["stop_tokens"] == ["}"]
    assert report.verifier == load_recipe("tiny").eval.reward


def test_the_summary_has_exactly_its_keys(run):
    summary = json.loads((run / "summary.json").read_text())
    assert set(summary) == {
        "recipe", "preset", "steps", "wall_seconds", "base", "final", "base_stderr",
        "final_stderr", "base_greedy", "final_greedy", "comparable", "generated_tokens",
        "trained_tokens", "replayed_rollouts", "means", "replay", "checkpoint",
    }  # fmt: skip
    rows = metrics_of(run)
    assert summary["generated_tokens"] == sum(row["cost/generated_tokens"] for row in rows)
    assert summary["trained_tokens"] == sum(row["cost/trained_tokens"] for row in rows)
    assert summary["replayed_rollouts"] == sum(row["replay/rollouts"] for row in rows)
    assert summary["checkpoint"] == "checkpoints/step_000005"
    benchmarks = {"tiny_add", "tiny_sub", "tiny_mul", "tiny_order", "tiny_pair", "mean"}
    assert set(summary["base"]) == set(summary["final"]) == benchmarks
    assert rows[-1]["eval/mean"] == summary["final"]["mean"]
    for name, mean in summary["means"].items():
        defined = [row[name] for row in rows if row[name] is not None]
        assert mean == pytest.approx(sum(defined) / len(defined)), name
    assert rows[0]["replay/clip_fraction"] is None, "the warm-up does not count as 0"


def test_plain_transformers_loads_the_checkpoint(run):
    state = json.loads((run / "checkpoints/latest/state.json").read_text())
    assert (state["step"], state["policy_version"], state["prompt_cursor"]) == (5, 5, 40)
    folder = run / "checkpoints/latest/model"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    prompt = tokenizer("47+38=", return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=20, do_sample=False)
    assert "\\boxed{" in tokenizer.decode(output[0])
    assert (folder / "README.md").read_text().startswith("---\nlibrary_name: transformers")


def test_rollouts_are_shown_now_and_then_and_tensorboard_has_them(run, watcher):
    assert list(watcher.samples) == [1, 2, 4, 5]
    for step, rows in watcher.samples.items():
        table = pq.read_table(run / f"rollouts/step_{step:06d}.parquet").to_pylist()
        logged = {row["rollout_id"]: row for row in table}
        assert [row["rollout_id"] for row in rows] == [min(logged), max(logged)]
        for row in rows:
            of_file = logged[row["rollout_id"]]
            assert row["completion"] == of_file["completion_text"]
            assert (row["reward"], row["verdict"]) == (of_file["reward"], of_file["verdict"])
            assert row["tokens"] == len(of_file["completion_token_ids"])
            assert row["prompt"].endswith("=")
    # Here: it takes half a second to load in every worker of the tests.
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    shown = events.Tensors("samples/text_summary")
    assert len(shown) == 4
    assert watcher.samples[2][0]["completion"] in shown[1].tensor_proto.string_val[0].decode()


def test_texts_that_are_long_or_hostile_to_a_terminal_fit_on_a_line():
    assert shortened("a\x1b[31m\nb") == "a [31m b"
    assert len(shortened("x" * 10_000)) == 303
    row = {"rollout_id": 1, "prompt": "[/a]", "completion": "[bold]", "reward": 1.0,
           "verdict": "correct"}  # fmt: skip
    assert samples_table(1, [row]).columns[4]._cells[0].plain == "[bold]"


def test_the_sampler_drops_its_weights_only_where_a_push_comes_next(run, watcher):
    """After a step, but not after an evaluation."""
    calls = [call for call in watcher.told_sampler if call != "generate"]
    assert [calls[at + 1] for at, call in enumerate(calls) if call == ("sleep", False)] == [
        "load_weights"
    ] * 5
    after_evaluations = [
        following for call, following in pairwise(calls) if call == ("sleep", None)
    ]
    assert len(after_evaluations) == 2 and "load_weights" not in after_evaluations


def test_an_observer_gets_the_report_of_each_evaluation(run, watcher):
    written = {int(path.stem[5:]): read_report(path) for path in (run / "eval").glob("*.json")}
    assert len(written) >= 2
    assert {step: each.accuracies() for step, each in watcher.reports.items()} == {
        step: each.accuracies() for step, each in written.items()
    }
    said = [each for each in watcher.statuses if each.startswith("evaluating")]
    assert said == [f"evaluating step {step}" for step in sorted(written)]
