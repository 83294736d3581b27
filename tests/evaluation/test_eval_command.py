"""`grpo-replay eval`: from the checkpoint to the output files, and its errors."""

import hashlib
import json
import shutil
from dataclasses import replace

import pytest
from commands import folder_of_generations, recipe_of_evaluation

from grpo_replay.cli.eval_command import run
from grpo_replay.cli.options import EvalOptions
from grpo_replay.errors import (
    CheckpointError,
    OutputDirectoryError,
    RecipeError,
    UsageError,
)
from grpo_replay.evaluation.cache import sampler_facts
from grpo_replay.evaluation.evaluation_report import read_report
from grpo_replay.evaluation.session import (
    find_model,
    model_sha256,
)
from grpo_replay.recipe import load_recipe
from grpo_replay.tiny import BASE_DIR

FAST = ("eval.max_problems=4", "eval.samples=2", "eval.reward=minerva", "reward.workers=1")
CHAT = ("prompts.template=chat", "prompts.system_prompt=null", "sampling.max_completion_length=16")


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
    assert "step_000002" in captured.err and "tiny_pair" in captured.out
    report = read_report(output)
    assert report.model["step"] == 2
    assert report.settings["temperature"] == 1.0
    assert report.settings["user_template"] == "{problem}="
    assert len(report.samples) == 5 * 4 * 3


def test_all_names_of_a_checkpoint_find_the_same_model(run_folder):
    newest = "checkpoints/step_000002"
    for place in ("", "checkpoints", newest, "checkpoints/latest", f"{newest}/model"):
        source = find_model(str(run_folder / place))
        assert source.path == str(run_folder / newest / "model")
        assert (source.step, source.recipe) == (2, run_folder / "recipe.yaml")
    (run_folder / "checkpoints" / "latest").unlink()
    assert find_model(str(run_folder)).step == 2
    assert find_model("Qwen/Qwen3-0.6B-Base").path == "Qwen/Qwen3-0.6B-Base"


def test_a_folder_without_a_checkpoint_is_refused(tmp_path, run_folder):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for place in ("empty", "file", "no/folder/here"):
        with pytest.raises(CheckpointError, match="expected a checkpoint"):
            find_model(str(tmp_path / place))
    (tmp_path / "of_trl/checkpoint-4").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"did you mean .*of_trl/checkpoint-4\?"):
        find_model(str(tmp_path / "of_trl"))
    (tmp_path / "of_trl/checkpoint-4/adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="only adapters"):
        find_model(str(tmp_path / "of_trl/checkpoint-4"))
    (run_folder / "checkpoints" / "step_000001" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="expected a checkpoint"):
        find_model(str(run_folder / "checkpoints" / "step_000001"))


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
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing"):
        model_sha256(source.path, source.checked)


def test_without_a_recipe_the_settings_are_paper_a_s_for_its_smaller_models():
    recipe = recipe_of_evaluation("Qwen/Qwen3-4B-Base")
    assert recipe.eval.benchmarks == ["paper"]
    assert (recipe.eval.temperature, recipe.eval.top_p) == (0.6, 0.8)
    assert recipe.sampling.max_completion_length == 8192
    assert recipe.eval.reward == "math_verify_boxed"


def test_families_of_reasoning_gym_that_the_options_name_are_graded_by_their_own_scorer(run_folder):
    """Unless a verifier is named for them: by --set, --recipe, or a run that evaluates families."""
    family, run = ("reasoning_gym:gcd",), str(run_folder)

    def verifier(model: str, *overrides: str, **options) -> str:
        return recipe_of_evaluation(model, overrides=overrides, **options).eval.reward

    for model, usual in (("Qwen/Qwen3-0.6B", "math_verify_boxed"), (run, "math_verify")):
        assert verifier(model, benchmarks=family) == "reasoning_gym"
        assert verifier(model, f"eval.benchmarks=[{family[0]}]") == "reasoning_gym"
        assert verifier(model, "eval.reward=boxed", benchmarks=family) == "boxed"
        assert verifier(model, benchmarks=("math500",)) == usual
    assert verifier(run, recipe="tiny", benchmarks=family) == "math_verify"
    (run_folder / "recipe.yaml").write_text(
        "eval: {benchmarks: ['reasoning_gym:chain_sum'], reward: boxed}\n"
    )
    assert verifier(run, benchmarks=family) == "boxed"


def test_a_checkpoint_is_evaluated_with_its_own_weights_and_tokenizer(run_folder):
    (run_folder / "recipe.yaml").write_text(
        "model: {path: builtin:qwen3-0.6b, tokenizer: builtin:bytes, \n"
        "        random_init: {num_hidden_layers: 1}}\neval: {benchmarks: [tiny]}\n"
    )
    source = find_model(str(run_folder))
    model = recipe_of_evaluation(str(run_folder)).model
    assert (model.path, model.tokenizer) == (source.path, None)
    assert model.random_init is False


def test_each_precision_and_tokenizer_has_its_own_generations_folder(tmp_path):
    """Stop tokens, precision and options of the engine determine a completion."""
    fp32_head = "sampling.vllm.hf_overrides={head_dtype: float32}"
    changes = [
        [],
        ["sampling.stop_tokens=['}']"],
        ["model.dtype=bfloat16"],
        ["sampling.backend=vllm"],
        ["sampling.backend=vllm", "sampling.vllm.dtype=bfloat16"],
        ["model.tokenizer=builtin:bytes"],
        ["model.tokenizer=a/b"],
        ["model.tokenizer=a_b"],
        [fp32_head],
        [fp32_head, "sampling.backend=vllm"],
        ["sampling.backend=vllm", "sampling.vllm.quantization=fp8"],
        ["sampling.backend=vllm", "sampling.vllm.kv_cache_dtype=fp8"],
    ]
    folders = [folder_of_generations(tmp_path, load_recipe("tiny", c)) for c in changes]
    assert len(set(folders)) == len(changes)
    assert {folder.parent for folder in folders} == {tmp_path}
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


def test_options_override_the_recipe():
    recipe = recipe_of_evaluation(
        "builtin:tiny", benchmarks=["tiny_add"], k=3, backend="vllm", greedy=False,
        overrides=["eval.max_completion_length=99", "eval.samples=7"],
    )  # fmt: skip
    assert (recipe.eval.benchmarks, recipe.eval.samples) == (["tiny_add"], 3)
    assert recipe.sampling.backend == "vllm" and recipe.eval.greedy is False
    assert recipe.sampling.max_completion_length == 99


def own_benchmark(tmp_path, **more):
    rows = [
        {"problem": f"{n}+1", "answer": f"{n}+1 = {n + 1}\n#### {n + 1}", "limit": n % 2} | more
        for n in range(4)
    ]
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_function_of_the_user_grades_with_prompt_row_and_marked_answer(tmp_path, monkeypatch):
    """The prompt as it is rendered in training: its tokens do not decode to it, without a Q."""
    (tmp_path / "judge.py").write_text(
        "def half(completion, answer, row, prompt):\n"
        "    assert prompt == 'Q' + row['problem'] + '=', prompt\n"
        "    assert row['answer'].endswith('#### ' + answer)\n"
        "    return row['limit'] + 0.5\n"
    )
    monkeypatch.chdir(tmp_path)
    options = EvalOptions(
        "builtin:tiny", benchmarks=[own_benchmark(tmp_path)], output="eval.json",
        overrides=("eval.samples=1", "eval.reward=judge.py:half", "eval.greedy=false",
                   "prompts.user_template=Q{problem}="),
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


def test_options_and_outputs_that_cannot_be_are_refused_before_sampling(tmp_path):
    with pytest.raises(RecipeError, match=r"eval\.nothing"):
        recipe_of_evaluation("builtin:tiny", overrides=["eval.nothing=1"])
    empty, other = tmp_path / "empty.yaml", tmp_path / "other.json"
    empty.write_text("{}")
    other.write_text("{}")
    with pytest.raises(UsageError, match="benchmarks"):
        recipe_of_evaluation("builtin:tiny", recipe=str(empty))
    with pytest.raises(UsageError, match=r"\.json"):
        run(EvalOptions("builtin:tiny", output=str(tmp_path / "x.txt")))
    with pytest.raises(OutputDirectoryError, match=r"not an evaluation file.*another name"):
        run(EvalOptions("builtin:tiny", output=str(other)))


def test_a_comparison_notices_that_the_prompts_were_others(tmp_path, capsys):
    """The same problems under a chat template that prints the date, on two dates."""
    model = tmp_path / "model"
    shutil.copytree(BASE_DIR, model)
    (model / "chat_template.jinja").write_text("{{ strftime_now('%d') }}{{ messages[-1].content }}")
    paths = [str(tmp_path / f"{name}.json") for name in ("a", "b", "c")]
    for path, date in zip(paths, ("2024-07-26", "2024-07-26", "2024-07-31"), strict=True):
        chat = (*CHAT, f"prompts.date={date}")
        options = EvalOptions(str(model), benchmarks=("tiny_pair",), output=path)
        assert run(replace(options, overrides=(*FAST, *chat))) == 0
    capsys.readouterr()
    for other, said in ((paths[1], ""), (paths[2], "prompts for the same problems of tiny_pair")):
        assert run(EvalOptions(compare=(paths[0], other), as_json=True)) == 0
        error = capsys.readouterr().err
        assert said in error and bool(error) == bool(said)
