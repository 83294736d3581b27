"""`grpo-replay eval --push-to-hub`: the real client of the hub pushes to a server of ours."""

import hashlib
import json
import shutil
from dataclasses import replace

import pytest
import yaml
from fake_hub import FakeHub

from grpo_replay.cli.eval_command import run
from grpo_replay.errors import HubError, UsageError
from grpo_replay.evaluation.evaluation_recipe import EvalOptions
from grpo_replay.evaluation.evaluation_report import read_report
from grpo_replay.evaluation.hub_card import evaluated_card
from grpo_replay.tiny import BASE_DIR

FAST = ("eval.max_problems=4", "eval.samples=2", "eval.benchmarks=[tiny_add]", "eval.greedy=false")
MODEL_FILES = (
    *("config.json", "generation_config.json", "model.safetensors"),
    *("tokenizer.json", "tokenizer_config.json"),
)


@pytest.fixture
def hub(monkeypatch):
    """A hub where the user is called me, and the only one that huggingface_hub knows."""
    server = FakeHub({"my-token": "me"})
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", "my-token")
    yield server
    server.close()


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint of a LoRA run as training leaves it, with other files beside the model."""
    run_dir = tmp_path / "lora-run"
    folder = run_dir / "checkpoints" / "step_000020"
    shutil.copytree(BASE_DIR, folder / "model")
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_model.safetensors").write_bytes(b"low rank")
    (folder / "adapter" / "adapter_config.json").write_text('{"r": 8}')
    (folder / "adapter" / "README.md").write_text("peft's card")
    (folder / "model" / "notes.txt").write_text("mine alone")
    (folder / "state.json").write_text(json.dumps({"step": 20}))
    facts = {
        f"model/{name}": {
            "sha256": hashlib.sha256((folder / "model" / name).read_bytes()).hexdigest()
        }
        for name in MODEL_FILES
    }
    (folder / "manifest.json").write_text(json.dumps({"files": facts}))
    recipe = {
        "model": {"path": "Qwen/Qwen3-0.6B-Base", "lora": {"rank": 8}},
        "prompts": {"source": "/home/me/secret/train.jsonl"},
    }
    (run_dir / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder


def options(ckpt, tmp_path, **changes):
    given = {
        **{"recipe": "tiny", "output": str(tmp_path / "eval.json"), "overrides": FAST},
        "push_to_hub": "me/adder",
    }
    return EvalOptions(ckpt and str(ckpt), **{**given, **changes})


def test_model_adapters_and_card_are_pushed_to_a_private_repository(
    hub, checkpoint, tmp_path, capsys
):
    assert run(options(checkpoint, tmp_path)) == 0
    repository = hub.repositories["me/adder"]
    assert repository["private"] is True
    assert repository["messages"] == ["lora-run-step_000020, evaluated by grpo-replay"]
    pushed = repository["files"]
    adapters = ["adapter/adapter_config.json", "adapter/adapter_model.safetensors"]
    assert sorted(pushed) == sorted(["README.md", *adapters, *MODEL_FILES])
    for name in MODEL_FILES:
        assert pushed[name] == (checkpoint / "model" / name).read_bytes()
    assert pushed["adapter/adapter_model.safetensors"] == b"low rank"
    assert f"pushed: {hub.url}/me/adder" in capsys.readouterr().out
    check_card(pushed["README.md"].decode(), read_report(tmp_path / "eval.json"))


def check_card(card, report):
    _, head, text = card.split("---\n", 2)
    metadata = yaml.safe_load(head)
    assert metadata["base_model"] == "Qwen/Qwen3-0.6B-Base"
    assert "datasets" not in metadata  # a local file
    (result,) = metadata["model-index"][0]["results"]
    accuracy = 100 * report.sampled.benchmarks["tiny_add"].avg_at_k
    assert result["metrics"][0]["value"] == pytest.approx(accuracy, abs=0.005)
    assert "[Qwen/Qwen3-0.6B-Base](https://huggingface.co/Qwen/Qwen3-0.6B-Base)" in text
    assert "| tiny_add | 4 | 2 |" in text
    assert "| training steps | 20 |" in text
    assert "LoRA, rank 8" in text
    assert "secret" not in card
    own = replace(report, settings={**report.settings, "reward": "/home/me/secret/mine.py:score"})
    card = evaluated_card("me/adder", own, None, None)
    assert "graded by mine.py:score." in card and "secret" not in card


def test_public_makes_a_public_repository(hub, tmp_path):
    run(options(BASE_DIR, tmp_path, public=True))
    repository = hub.repositories["me/adder"]
    assert repository["private"] is False
    assert b"Evaluated by grpo-replay" in repository["files"]["README.md"]


def test_a_repository_that_is_public_already_gets_nothing_without_public(hub, tmp_path):
    hub.repositories["me/adder"] = {"private": False, "files": {}, "messages": []}
    with pytest.raises(HubError, match=r"exists and is public: add --public"):
        run(options(BASE_DIR, tmp_path))
    assert hub.repositories["me/adder"]["files"] == {}


def test_offline_the_files_and_sizes_are_listed_and_nothing_is_sent(
    hub, checkpoint, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.delenv("HF_TOKEN")
    assert run(options(checkpoint, tmp_path)) == 0
    lines = capsys.readouterr().out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("offline"))
    assert "nothing was pushed. To me/adder, private if new" in lines[start]
    *listed, total = lines[start + 1 :]
    sizes = {line.split()[2]: int(line.split()[0].replace(",", "")) for line in listed}
    for name in MODEL_FILES:
        assert sizes[name] == (checkpoint / "model" / name).stat().st_size
    assert sizes["adapter/adapter_model.safetensors"] == len(b"low rank")
    assert sizes["README.md"] > 500
    assert len(sizes) == len(MODEL_FILES) + 3
    assert total.split() == [f"{sum(sizes.values()):,}", "bytes", "in", str(len(sizes)), "files"]
    assert hub.requests == [] and hub.repositories == {}


def test_an_existing_repository_gets_a_commit_and_with_json_stdout_is_the_report_alone(
    hub, tmp_path, capsys
):
    files = {"README.md": b"an earlier card", "data.txt": b"of the user"}
    hub.repositories["me/adder"] = {"private": True, "files": files, "messages": []}
    run(options(BASE_DIR, tmp_path, as_json=True))
    captured = capsys.readouterr()
    assert json.loads(captured.out)["model"]["name"] == BASE_DIR.name
    assert "pushed: " in captured.err
    assert sorted(files) == sorted(["README.md", "data.txt", *MODEL_FILES])
    assert files["data.txt"] == b"of the user" and files["README.md"] != b"an earlier card"


@pytest.mark.parametrize(
    ("token", "reason"),
    [
        (None, r"there is no token for http://127.*: run `hf auth login`, or set HF_TOKEN"),
        ("old-token", r"does not accept the token: run `hf auth login`"),
    ],
)
def test_without_a_valid_token_nothing_is_sampled(
    hub, tmp_path, monkeypatch, capsys, token, reason
):
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    if token is None:
        monkeypatch.delenv("HF_TOKEN")
    else:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(HubError, match=reason):
        run(options(BASE_DIR, tmp_path))
    assert not (tmp_path / "eval.json").exists()


def test_a_hub_that_is_out_of_reach_is_noticed_before_sampling(hub, tmp_path):
    hub.close()
    with pytest.raises(HubError, match=r"cannot be reached .* check the network and HF_ENDPOINT"):
        run(options(BASE_DIR, tmp_path))
    assert not (tmp_path / "eval.json").exists()


FORBIDDEN = r"may not write there \(You don't have the rights.* access to other"
READ_ONLY = r"may not write there \(read only"


@pytest.mark.parametrize(
    ("repository", "failing", "reason"),
    [
        ("me/adder", {"/commit/main": (500, "out of order")}, r"did not take the push \(out of"),
        pytest.param("other/model", {}, FORBIDDEN, marks=pytest.mark.slow),
        pytest.param(
            "me/adder", {"/preupload/main": (403, "read only")}, READ_ONLY, marks=pytest.mark.slow
        ),
    ],
)
def test_a_refused_push_keeps_the_evaluation(hub, tmp_path, repository, failing, reason):
    hub.failing = failing
    with pytest.raises(HubError, match=reason) as caught:
        run(options(BASE_DIR, tmp_path, push_to_hub=repository))
    assert caught.value.exit_code == 3
    assert "the evaluation is kept in" in caught.value.__notes__[0]
    assert len(read_report(tmp_path / "eval.json").samples) == 8


@pytest.mark.parametrize(
    ("ckpt", "changes", "reason"),
    [
        (BASE_DIR, {"push_to_hub": "adder"}, r"name the repository as OWNER/NAME"),
        (BASE_DIR, {"push_to_hub": "me/a b"}, r"--push-to-hub me/a b: Repo id must use"),
        ("Qwen/Qwen3-0.6B", {}, r"uploads the folder of a checkpoint, .*Qwen3-0.6B is none"),
        (BASE_DIR, {"push_to_hub": None, "public": True}, r"--public needs --push-to-hub"),
        (
            None,
            {"compare": ("a.json", "b.json"), "recipe": None, "output": None, "overrides": ()},
            r"--push",
        ),
    ],
)
def test_a_push_that_makes_no_sense_is_refused(hub, tmp_path, ckpt, changes, reason):
    chosen = options(ckpt, tmp_path, **changes)
    with pytest.raises(UsageError, match=reason):
        run(chosen)
    assert hub.requests == []
