"""The dry run and a refused start say the same, word for word, and the refused start leaves no
folder."""

import json
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from server_helpers import free_ports
from slow_tests import slow_except

from grpo_replay.collection.journal import Journal
from grpo_replay.distributed.comm import Comm
from grpo_replay.errors import GrpoReplayError, NotFetchedError, RecipeError
from grpo_replay.lab.dry_run import dry_run_report
from grpo_replay.lab.dry_run.dry_run_report import dry_run
from grpo_replay.recipe import Recipe, load_recipe
from grpo_replay.sampling.sampler_protocol import SamplerOpening
from grpo_replay.sampling.server import server_process
from grpo_replay.sampling.server.sampler import VllmServerSampler
from grpo_replay.shipped_recipes import shipped_recipes
from grpo_replay.storage.run_directory import JOURNAL_FOLDER, LOCK, RunDirectory
from grpo_replay.storage.stored_recipe import RECIPE_FILE, recipe_to_resume
from grpo_replay.tiny import BASES
from grpo_replay.training import Notice, disk_room, opening
from grpo_replay.training.opening import RunOpener, missing_packages

QUICK = [
    *("engine.device=cpu", "reward.workers=1", "reward.function=minerva"),
    *("eval.benchmarks=[]", "eval.reward=minerva"),
]


@pytest.fixture(autouse=True)
def quick_and_offline(monkeypatch):
    """Without memory, which a start does not estimate, and on a large disk."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(dry_run_report, "_try_plan", lambda *_: None)
    monkeypatch.setattr(disk_room, "free_bytes", lambda _: 2**50)


def start(
    recipe: Recipe, folder: Path, resume: bool = False, opens: bool = True
) -> tuple[list[Notice], GrpoReplayError | None]:
    """What a start on this machine says, and is refused with."""
    device = SimpleNamespace(type="cpu")
    with ExitStack() as stack:
        opener = RunOpener(recipe, Comm(), device, RunDirectory(folder), stack, resume=resume)
        try:
            opener.open() if opens else opener.check()
        except GrpoReplayError as error:
            return opener.notices, error
    return opener.notices, None


def compare(recipe: Recipe, folder: Path, resume: bool = False, opens: bool = True) -> str | None:
    """The refusal of both; None if neither refuses."""
    notices, error = start(recipe, folder, resume, opens)
    report = dry_run(recipe, output_dir=folder, resume=resume).to_json()
    said = [Notice(**each) for each in report["notices"]]
    assert said[: len(notices)] == notices
    if error is None:
        assert report["problems"] == [] and said == notices
        return None
    if isinstance(error, NotFetchedError):  # it may be where the run runs
        assert report["problems"] == [] and report["unchecked"][0] == str(error)
    else:
        assert report["problems"][0] == str(error)
        assert report["exit_code"] == error.exit_code
    return str(error)


@pytest.mark.parametrize("name", slow_except(["tiny", "qwen3-4b"], shipped_recipes()))
def test_of_every_shipped_recipe(name, tmp_path):
    """On this machine's CPU. Without the hub, those of its models are refused; without vLLM, those
    that sample with it."""
    folder = tmp_path / "run"
    recipe = load_recipe(name, ["engine.device=cpu", "engine.num_processes=1"])
    refused = compare(recipe, folder, opens=False)
    starts_here = recipe.model.path.startswith("builtin:") and not missing_packages(recipe)
    assert (refused is None) == starts_here
    assert not folder.exists()


def rows(tmp_path: Path, *lines: dict) -> list[str]:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [f"prompts.source={file}", "prompts.id_field=null", "eval.benchmarks=[]"]


def model_without(tmp_path: Path, *names: str, template: str = "") -> list[str]:
    folder = shutil.copytree(BASES["tiny"], tmp_path / "model")
    if template:
        (folder / "chat_template.jinja").write_text(template)
    for name in names:
        for file in folder.glob(name):
            file.unlink()
    return [f"model.path={folder}"]


def functions(tmp_path: Path, text: str, key: str = "reward.function") -> list[str]:
    (tmp_path / "functions.py").write_text(text)
    return [f"{key}={tmp_path}/functions.py:score"]


def benchmark(tmp_path: Path, problem: str) -> list[str]:
    file = tmp_path / "held_out.jsonl"
    file.write_text(json.dumps({"problem": problem, "answer": "3"}) + "\n")
    return [f"eval.benchmarks=[{file}]"]


ONE = {"problem": "1+2", "answer": "3"}
BROKEN: dict[str, tuple[Callable[[Path], Sequence[str]], str]] = {
    "no model folder": (lambda at: [f"model.path={at}/model"], "no such folder"),
    "no config": (lambda at: model_without(at, "config.json"), "no config.json"),
    "no tokenizer": (lambda at: model_without(at, "*token*"), "no tokenizer in"),
    "no weights": (lambda at: model_without(at, "*.safetensors"), "no weights in"),
    "another tokenizer": (lambda _: ["model.tokenizer=builtin:bytes"], "vocab_size"),
    "a bad chat template": (
        lambda at: [*model_without(at, template="{{ raise_exception('no') }}"),
                    "prompts.template=chat"],
        "chat template failed",
    ),
    "no prompts": (lambda at: [f"prompts.source={at}/none.jsonl"], "none.jsonl does not exist"),
    "no rows": (lambda at: rows(at), "no rows"),
    "no such column": (lambda at: rows(at, {"problem": "1+2"}), "'answer'"),
    "prompts too long": (
        lambda at: [*rows(at, ONE), "prompts.max_prompt_length=1"], "none of 1 prompts",
    ),
    "answers that are none": (
        lambda at: [*rows(at, ONE | {"answer": "w " * 300}), "reward.function=minerva"],
        "minerva can read none of 1",
    ),
    "no such verifier": (lambda _: ["reward.function=nowhere:score"], "nowhere"),
    "no file of functions": (lambda at: [f"reward.function={at}/no.py:score"], "no file"),
    "functions that do not import": (lambda at: functions(at, "def score(:\n"), "functions.py"),
    "a function that fails": (
        lambda at: functions(at, "def score(completion, answer):\n    return 1 / 0\n"),
        "ZeroDivisionError",
    ),
    "a function of other arguments": (
        lambda at: [*functions(at, "def score(text, gold):\n    return 1.0\n", "eval.reward"),
                    "eval.benchmarks=[tiny_add]"],
        "score(text, gold)",
    ),
    "no benchmark": (lambda at: [f"eval.benchmarks=[{at}/none.csv]"], "none.csv does not exist"),
    "a benchmark too long": (
        lambda at: [*benchmark(at, "+".join("1" * 30)), "prompts.max_prompt_length=16"],
        "60 tokens",
    ),
    "completions too long": (lambda _: ["sampling.max_completion_length=126"], "126"),
    "evaluated completions too long": (
        lambda _: ["eval.benchmarks=[tiny_add]", "eval.max_completion_length=128"],
        "lower it to 122 or less",
    ),
    "no server": (
        lambda _: ["sampling.backend=vllm_server", "sampling.servers.urls=[http://127.0.0.1:9]"],
        "no vLLM server is left (http://127.0.0.1:9",
    ),
    "no vllm": (lambda _: ["sampling.backend=vllm"], "vLLM is not installed"),
    "no journal": (
        lambda at: ["run.mode=async", "sampling.backend=vllm_server", "sampling.servers.launch=1",
                    "loss.behavior_logprobs=sampler",
                    f"sampling.collection.replay_journal={at}/no"],
        "replay_journal",
    ),
    "no tracker": (
        lambda _: ["tracking.report_to=[wandb]"], "'grpo-replay[wandb]'",
    ),
    "no peft": (lambda _: ["model.lora.r=8"], "'grpo-replay[lora]'"),
    "a secret": (lambda _: ["sampling.vllm.hf_token=hf_" + "a" * 34], "looks like a secret"),
    "no priority": (lambda _: ["replay.priority=nowhere.py:f"], "replay.priority"),
    "no advantage": (lambda _: ["advantage.estimator=nowhere.py:f"], "advantage.estimator"),
    "no loss": (lambda _: ["loss.kind=nowhere.py:f"], "loss.kind"),
    "no optimizer setting": (lambda _: ["optimizer.adamw.nonsense=1"], "optimizer.adamw: "),
    "no DeepSpeed setting": (lambda _: ["engine.zero.nonsense=3"], "engine.zero: nonsense"),
    "no stop token": (lambda _: ["sampling.stop_tokens=[nowhere]"], "not a token"),
    "compiled at ZeRO 3": (
        lambda _: ["engine.zero_stage=3", "model.compile=true"], "model.compile true at ZeRO 3",
    ),
    "an attention of GPUs": (lambda _: ["model.attn_implementation=flash_attention_2"], "a GPU"),
}  # fmt: skip


TESTED_ELSEWHERE = {
    "no such verifier", "no file of functions", "functions that do not import", "no priority",
    "no advantage", "no stop token",
}  # fmt: skip
"""Their refusals have tests of their own, and the same stage another case here."""


@pytest.mark.parametrize("broken", slow_except(BROKEN.keys() - TESTED_ELSEWHERE, BROKEN))
def test_of_a_broken_recipe(broken, tmp_path, monkeypatch):
    for name in ("vllm", "wandb", "peft"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    words, expected = BROKEN[broken]
    folder = tmp_path / "run"
    refused = compare(load_recipe("tiny", [*QUICK, *words(tmp_path)]), folder)
    assert refused is not None and expected in refused
    assert not folder.exists()


@pytest.fixture
def launching(monkeypatch) -> Iterator[list[str]]:
    """Overrides of a run that launches two servers, the second on a port that is taken, and a
    machine with a GPU."""
    monkeypatch.setattr(server_process, "_visible_devices", lambda: ["0"])
    monkeypatch.setattr(server_process, "PORT_SECONDS", 0.0)
    monkeypatch.setattr(opening, "missing_packages", lambda _: [])
    first, second = free_ports(2)
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", second))
        stranger.listen()
        address = f"sampling.servers.address=127.0.0.1:{first}"
        yield ["sampling.backend=vllm_server", "sampling.servers.launch=2", address]


def test_of_servers_whose_port_is_taken(launching, tmp_path):
    refused = compare(load_recipe("tiny", [*QUICK, *launching]), tmp_path / "run", opens=False)
    assert refused is not None and "Address already in use" in refused


def test_launched_servers_need_gpus_beside_the_ranks(launching, monkeypatch):
    monkeypatch.setattr(server_process, "_refuse_taken_port", lambda *_: None)
    recipe = load_recipe("tiny", launching)
    opened = replace(SamplerOpening.from_recipe(recipe, recipe.model.path, Comm()), on_gpu=True)
    with pytest.raises(RecipeError, match="needs 2 GPUs in addition to the 1"):
        VllmServerSampler.check(opened, ranks=1, ranks_here=1)


def test_a_plan_for_elsewhere_asks_where_the_ranks_are_and_not_what_is_free_here(
    launching, monkeypatch
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    recipe = load_recipe("tiny", [*launching, "engine.num_processes=4", "eval.benchmarks=[]"])
    assert dry_run(recipe, gpu_memory_gib=80).findings.problems == []
    (problem,) = dry_run(recipe, gpu_memory_gib=80, ranks_of_nodes=[4, 4]).findings.problems
    assert "sampling.servers.launch 2: 4 of the 8 ranks are on this machine" in problem


def test_of_repeated_prompts_that_are_also_evaluated(tmp_path):
    own = [*rows(tmp_path, ONE, ONE, ONE | {"answer": "4"}), *benchmark(tmp_path, "1+2")]
    recipe = load_recipe("tiny", [*QUICK, *own])
    assert compare(recipe, tmp_path / "run", opens=False) is None
    notices, _ = start(recipe, tmp_path / "run", opens=False)
    said = " ".join(each.text for each in notices if each.key == "prompts")
    assert "of 3 prompts" in said and "benchmark 'held_out'" in said


def test_of_engines_that_would_span_nodes(monkeypatch):
    monkeypatch.setattr(opening, "missing_packages", lambda _: [])
    words = ["sampling.backend=vllm", "sampling.vllm.tensor_parallel_size=2", "eval.benchmarks=[]"]
    plan = dry_run(load_recipe("tiny", words), gpu_memory_gib=80, ranks_of_nodes=[3, 3])
    (problem,) = plan.findings.problems
    assert "2 does not divide the 3 ranks of a node" in problem


def test_of_a_full_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_room, "free_bytes", lambda _: 10)
    refused = compare(load_recipe("tiny", QUICK), tmp_path / "run")
    assert refused is not None and "a checkpoint of this run needs" in refused
    assert not (tmp_path / "run").exists()


def test_of_a_folder_with_a_journal(tmp_path):
    """Its groups are not lost: the run can go on with them."""
    Journal.open(tmp_path / JOURNAL_FOLDER)[0].close()
    for name in (LOCK, RECIPE_FILE):
        (tmp_path / name).touch()
    refused = compare(load_recipe("tiny", QUICK), tmp_path)
    assert refused is not None and "--resume" in refused
    assert {path.name for path in tmp_path.iterdir()} == {LOCK, RECIPE_FILE, JOURNAL_FOLDER}


RESUMES = [
    (["reward.correct=0.5"], "reward.correct is 1.0 in the run, and 0.5 is asked for"),
    (["run.steps=8"], "run.steps 8"),
]


@pytest.fixture
def run(ours_run, tmp_path) -> Path:
    return Path(shutil.copytree(ours_run.path, tmp_path / "run", symlinks=True))


@pytest.mark.parametrize(("changes", "expected"), RESUMES)
def test_of_a_resume_with_a_changed_key(changes, expected, run):
    before = sorted((p, p.stat().st_mtime_ns) for p in run.rglob("*"))
    refused = compare(recipe_to_resume(run, None, changes), run, resume=True, opens=False)
    assert refused is not None and expected in refused
    assert sorted((p, p.stat().st_mtime_ns) for p in run.rglob("*")) == before


def test_of_a_resume_whose_checkpoint_is_damaged_or_that_another_process_holds(run):
    recipe = recipe_to_resume(run, None, [])
    holder = RunDirectory(run)
    holder.lock()
    refused = compare(recipe, run, resume=True)
    assert refused is not None and "in use by process" in refused
    holder.unlock()
    newest = (run / "checkpoints" / "latest").resolve()
    (newest / "buffer.parquet").write_bytes(b"")
    refused = compare(recipe, run, resume=True)
    assert refused is not None and "is damaged: buffer.parquet" in refused
