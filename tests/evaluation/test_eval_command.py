"""`grpo-replay eval`: from the checkpoint to the output files, and its errors."""

import hashlib
import json
import shutil

import pytest
from commands import folder_of_generations, recipe_of_evaluation, run_comparison
from stand_ins import write_benchmarks, write_model

from grpo_replay.cli.eval_command import run
from grpo_replay.cli.options import EvalOptions
from grpo_replay.errors import (
    CheckpointError,
    DatasetError,
    EvaluationFileError,
    OutputDirectoryError,
    RecipeError,
    UsageError,
)
from grpo_replay.evaluation.evaluate import sampler_facts
from grpo_replay.evaluation.evaluation_report import read_report
from grpo_replay.evaluation.session import (
    evaluate_model,
    find_model,
    model_sha256,
    resolve_evaluation,
)
from grpo_replay.recipe import load_recipe
from grpo_replay.tiny import BASE_DIR

FAST = ("eval.max_problems=4", "eval.samples=2")
PAPER_RECIPE = """
prompts: {max_prompt_length: 256}
sampling: {max_completion_length: 6}
eval: {benchmarks: [paper]}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def run_folder(tmp_path):
    """A run directory as training leaves it, with two checkpoints of the tiny base."""
    run_dir = tmp_path / "run"
    for step in (1, 2):
        checkpoint = run_dir / "checkpoints" / f"step_{step:06d}"
        shutil.copytree(BASE_DIR, checkpoint / "model")
        (checkpoint / "state.json").write_text(json.dumps({"step": step}))
        facts = {
            f"model/{file.name}": {
                "bytes": file.stat().st_size,
                "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
            }
            for file in (checkpoint / "model").iterdir()
        }
        (checkpoint / "manifest.json").write_text(json.dumps({"files": facts}))
    (run_dir / "checkpoints" / "latest").symlink_to("step_000002")
    shutil.copy("recipes/tiny.yaml", run_dir / "recipe.yaml")
    return run_dir


def test_a_run_is_evaluated_at_its_latest_checkpoint_under_its_own_recipe(
    run_folder, tmp_path, capsys
):
    output = tmp_path / "eval.json"
    options = EvalOptions(str(run_folder), output=str(output), overrides=FAST)
    assert run(options) == 0
    captured = capsys.readouterr()
    assert f"evaluating step_000002, the latest checkpoint of {run_folder}" in captured.err
    assert "tiny_pair" in captured.out and "greedy" in captured.out
    report = read_report(output)
    assert report.model["step"] == 2
    assert report.settings["temperature"] == 1.0
    assert report.settings["user_template"] == "{problem}="
    assert len(report.samples) == 5 * 4 * 3
    assert not output.with_suffix(".md").exists()


def test_a_link_to_an_older_checkpoint_is_said(run_folder):
    checkpoints = run_folder / "checkpoints"
    (checkpoints / "step_000003").mkdir()
    notice = find_model(str(run_folder)).notice
    expected = (
        f"evaluating step_000002, which {checkpoints}/latest names, though step_000003 is newer"
    )
    assert notice == expected


@pytest.mark.parametrize(
    "place",
    [
        "",
        "checkpoints",
        "checkpoints/step_000002",
        "checkpoints/latest",
        "checkpoints/step_000002/model",
    ],
)
def test_all_names_of_a_checkpoint_find_the_same_model(run_folder, place):
    source = find_model(str(run_folder / place))
    assert source.path == str(run_folder / "checkpoints" / "step_000002" / "model")
    assert (source.step, source.recipe) == (2, run_folder / "recipe.yaml")


def test_a_folder_without_a_checkpoint_is_refused(tmp_path, run_folder):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for place, message in (
        ("empty", "is not a checkpoint"),
        ("file", "is a file"),
        ("missing/er/still", "no such folder"),
    ):
        with pytest.raises(CheckpointError, match=message):
            find_model(str(tmp_path / place))
    (tmp_path / "begun/checkpoints/x").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="has no checkpoint yet"):
        find_model(str(tmp_path / "begun"))
    (run_folder / "checkpoints" / "step_000001" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="incomplete"):
        find_model(str(run_folder / "checkpoints" / "step_000001"))


def test_without_the_link_the_newest_checkpoint_is_the_latest(run_folder):
    (run_folder / "checkpoints" / "latest").unlink()
    found = find_model(str(run_folder))
    assert found.step == 2 and "step_000002, the latest checkpoint" in (found.notice or "")


def test_a_checkpoint_that_its_run_removes_meanwhile_is_named(run_folder):
    source = find_model(str(run_folder))
    recipe = resolve_evaluation(source, overrides=FAST)
    shutil.rmtree(run_folder / "checkpoints" / "step_000002")
    with pytest.raises(CheckpointError, match=r"step_000002/model was removed .* takes the newest"):
        evaluate_model(recipe, source, run_folder / "generations", world_size=1)


def test_weights_that_differ_from_the_manifest_are_refused(run_folder):
    source = find_model(str(run_folder))
    before = model_sha256(source.path, source.checked)
    assert before == model_sha256(str(BASE_DIR), {})
    weights = run_folder / "checkpoints" / "step_000002" / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*damaged"):
        model_sha256(source.path, source.checked)
    assert model_sha256(source.path, {}) != before


def test_a_hub_id_is_distinguished_from_a_missing_folder():
    assert find_model("Qwen/Qwen3-0.6B-Base").path == "Qwen/Qwen3-0.6B-Base"


@pytest.mark.slow
def test_the_paper_group_can_be_read_from_a_folder(model, tmp_path, capsys):
    recipe = tmp_path / "paper.yaml"
    recipe.write_text(PAPER_RECIPE)
    data = write_benchmarks(tmp_path / "data", largest=3)
    output = tmp_path / "out" / "eval.json"
    options = {"recipe": str(recipe), "data_folder": str(data), "output": str(output)}
    run(EvalOptions(str(model), **options, as_json=True))
    document = json.loads(capsys.readouterr().out)
    assert list(document["benchmarks"]) == [
        *("math500", "aime25", "aime26", "hmmt_feb25", "hmmt_feb26")
    ]
    assert [each["n"] for each in document["benchmarks"].values()] == [3] * 5
    assert [each["k"] for each in document["benchmarks"].values()] == [8, 16, 16, 16, 16]
    waves = [each["seeds"] for each in document["settings"]["benchmarks"].values()]
    assert waves == [[42], *[[42, 43]] * 4]
    assert document["settings"]["temperature"] == 0.6 and document["settings"]["top_p"] == 0.8
    assert document["mean"]["truncation_rate"] > 0.5  # a random model does not stop
    assert len(document["model"]["sha256"]) == 64
    first = output.read_bytes()
    run(EvalOptions(str(model), **options))
    assert output.read_bytes() == first


def test_without_a_recipe_the_settings_are_paper_a_s_for_its_smaller_models():
    recipe = recipe_of_evaluation("Qwen/Qwen3-4B-Base")
    assert recipe.eval.benchmarks == ["paper"]
    assert (recipe.eval.temperature, recipe.eval.top_p) == (0.6, 0.8)
    assert recipe.sampling.max_completion_length == 8192
    assert recipe.eval.reward == "math_verify_boxed"


def test_a_checkpoint_is_evaluated_with_its_own_weights_and_tokenizer(run_folder):
    (run_folder / "recipe.yaml").write_text(
        "model: {path: builtin:qwen3-0.6b, tokenizer: builtin:bytes, \n"
        "        random_init: {num_hidden_layers: 1}}\neval: {benchmarks: [tiny]}\n"
    )
    source = find_model(str(run_folder))
    model = recipe_of_evaluation(str(run_folder)).model
    assert (model.path, model.tokenizer) == (source.path, None)
    assert model.random_init is False


def test_another_tokenizer_can_be_chosen():
    chosen = ["model.tokenizer=builtin:bytes"]
    model = recipe_of_evaluation("builtin:tiny", overrides=chosen).model
    assert (model.path, model.tokenizer) == ("builtin:tiny", "builtin:bytes")


def test_each_precision_and_tokenizer_has_its_own_generations_folder(tmp_path):
    """Stop tokens, precision and options of the engine determine a completion."""
    fp32_head = "sampling.vllm.hf_overrides={head_dtype: float32}"
    changes = [
        [],
        ["model.dtype=bfloat16"],
        ["sampling.backend=vllm"],
        ["sampling.backend=vllm", "sampling.vllm.dtype=bfloat16"],
        ["model.tokenizer=builtin:bytes"],
        ["model.tokenizer=a/b"],
        ["model.tokenizer=a_b"],
        [f"model.tokenizer={'deep/' * 60}t"],
        [fp32_head],
        [fp32_head, "sampling.backend=vllm"],
        ["sampling.backend=vllm", "sampling.vllm.quantization=fp8"],
        ["sampling.backend=vllm", "sampling.vllm.kv_cache_dtype=fp8"],
    ]
    folders = [folder_of_generations(tmp_path, load_recipe("tiny", c)) for c in changes]
    assert len(set(folders)) == len(changes)
    assert {folder.parent for folder in folders} == {tmp_path}
    assert max(len(folder.name.encode()) for folder in folders) < 255
    for unused in ("dtype=bfloat16", "quantization=fp8", "hf_token=secret"):  # by the hf backend
        recipe = load_recipe("tiny", [f"sampling.vllm.{unused}"])
        assert folder_of_generations(tmp_path, recipe) == folders[0]


def test_an_edited_sampler_of_the_user_has_another_generations_folder(tmp_path):
    file = tmp_path / "own_sampler.py"
    file.write_text("class Own: pass\n")
    recipe = load_recipe("tiny", [f"sampling.backend={file}:Own"])
    before = folder_of_generations(tmp_path / "g", recipe)
    assert before == folder_of_generations(tmp_path / "g", recipe)
    assert before.parent == tmp_path / "g"
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert sampler_facts(recipe.sampling) == {"sampler_options": {}, "sampler_sha256": digest}
    file.write_text("class Own: 'samples in another way'\n")
    assert folder_of_generations(tmp_path / "g", recipe) != before


def test_an_asynchronous_run_is_evaluated_on_any_backend(tmp_path):
    for backend in ("hf", "vllm"):
        recipe = recipe_of_evaluation("builtin:tiny", recipe="tiny-async", backend=backend)
        assert (recipe.run.mode, recipe.sampling.backend) == ("sync", backend)
    of_async_alone = ("run.sync_every_steps=7", "replay.max_age_steps=9",
                      f"sampling.collection.replay_journal={tmp_path}")  # fmt: skip
    recipe = recipe_of_evaluation("builtin:tiny", recipe="tiny-async", overrides=of_async_alone)
    assert recipe.sampling.servers_used == 1


def test_the_revision_of_a_recipe_belongs_to_its_model(tmp_path):
    recipe = tmp_path / "own.yaml"
    recipe.write_text("model: {path: me/tiny, revision: abc}\neval: {benchmarks: [tiny]}\n")
    for model, overrides, expected in (
        ("me/tiny", (), "abc"),
        ("me/other", (), None),
        ("me/other", ("model.revision=def",), "def"),
    ):
        found = recipe_of_evaluation(model, recipe=str(recipe), overrides=overrides)
        assert found.model.revision == expected


def test_options_override_the_recipe():
    recipe = recipe_of_evaluation(
        "builtin:tiny", benchmarks=["tiny_add"], k=3, backend="vllm", greedy=False,
        overrides=["eval.max_completion_length=99", "eval.samples=7"],
    )  # fmt: skip
    assert (recipe.eval.benchmarks, recipe.eval.samples) == (["tiny_add"], 3)
    assert recipe.sampling.backend == "vllm" and recipe.eval.greedy is False
    assert recipe.sampling.max_completion_length == 99


def test_bad_options_are_refused(tmp_path, model):
    with pytest.raises(RecipeError, match=r"eval\.nothing"):
        recipe_of_evaluation("builtin:tiny", overrides=["eval.nothing=1"])
    empty = tmp_path / "empty.yaml"
    empty.write_text("{}")
    with pytest.raises(UsageError, match="names no benchmarks"):
        recipe_of_evaluation("builtin:tiny", recipe=str(empty))
    with pytest.raises(UsageError, match=r"name a \.json file"):
        run(EvalOptions("builtin:tiny", output=str(tmp_path / "x.txt")))
    other = tmp_path / "other.json"
    other.write_text("{}")
    with pytest.raises(OutputDirectoryError, match="is not an evaluation file"):
        run(EvalOptions("builtin:tiny", output=str(other)))
    options = EvalOptions(str(model), output=str(tmp_path / "y.json"), data_folder=str(tmp_path))
    with pytest.raises(DatasetError, match=r"no math500\.jsonl"):
        run(options)


@pytest.mark.slow
def test_two_evaluations_are_compared(tmp_path, capsys):
    for seed in (1, 2):
        overrides = (*FAST, f"eval.seed={seed}")
        run(EvalOptions("builtin:tiny", output=str(tmp_path / f"{seed}.json"), overrides=overrides))
    capsys.readouterr()
    run_comparison(str(tmp_path / "1.json"), str(tmp_path / "2.json"), as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert len(document["benchmarks"]) == 5
    mean = document["mean"]
    assert mean["difference"] == pytest.approx(mean["accuracy_b"] - mean["accuracy_a"])
    low, high = mean["difference_interval"]
    assert low <= mean["difference"] <= high and 0 < mean["p_value"] <= 1
    run_comparison(str(tmp_path / "1.json"), str(tmp_path / "1.json"))
    assert "1.000" in capsys.readouterr().out
    with pytest.raises(EvaluationFileError):
        run_comparison(str(tmp_path / "1.json"), str(tmp_path / "3.json"))


def own_benchmark(tmp_path, **more):
    rows = [
        {"problem": f"{n}+1", "answer": f"{n}+1 = {n + 1}\n#### {n + 1}", "limit": n % 2} | more
        for n in range(4)
    ]
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_function_of_the_user_grades_with_the_row_and_the_marked_answer(tmp_path, monkeypatch):
    (tmp_path / "judge.py").write_text(
        "def half(completion, answer, row):\n"
        "    assert row['answer'].endswith('#### ' + answer)\n"
        "    return row['limit'] + 0.5\n"
    )
    monkeypatch.chdir(tmp_path)
    options = EvalOptions(
        "builtin:tiny", benchmarks=[own_benchmark(tmp_path)], output="eval.json",
        overrides=("eval.samples=1", "eval.reward=judge.py:half", "eval.greedy=false"),
    )  # fmt: skip
    assert run(options) == 0
    report = read_report(tmp_path / "eval.json")
    assert report.verifier == f"{tmp_path}/judge.py:half"
    assert report.settings["correct_score"] == 1.0
    source = (tmp_path / "judge.py").read_bytes()
    assert report.settings["reward_sha256"] == hashlib.sha256(source).hexdigest()
    assert report.samples["answer"].to_pylist() == ["1", "2", "3", "4"]
    assert report.samples["verdict"].to_pylist() == ["incorrect", "correct"] * 2
    assert report.accuracies()["mean"] == 0.5


def test_a_function_of_the_user_that_always_fails_is_refused_before_sampling(tmp_path):
    (tmp_path / "judge.py").write_text("def f(completion, answer, row):\n    return None\n")
    options = EvalOptions(
        "builtin:tiny", benchmarks=[own_benchmark(tmp_path)], output=str(tmp_path / "e.json"),
        overrides=(f"eval.reward={tmp_path}/judge.py:f",),
    )  # fmt: skip
    with pytest.raises(RecipeError, match=r"judge\.py:f failed on all 4 rows .*returned None"):
        run(options)
    assert not (tmp_path / "e.json").exists()
