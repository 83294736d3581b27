"""What a checkpoint says of its model, read by older libraries."""

import json
import shutil

import pytest
import torch
from architectures import random_model
from small_runs.trained import train_small_run

from grpo_replay.engine.models import byte_tokenizer, load_policy, load_tokenizer
from grpo_replay.engine.saved_policies import write_model, write_tokenizer
from grpo_replay.recipe import ModelSection
from grpo_replay.tiny import BASES

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
IDS = torch.arange(48)[None] * 5 % 250


def read(path):
    return json.loads(path.read_text())


def section(folder):
    return ModelSection(path=str(folder), tokenizer="builtin:bytes", attn_implementation="eager")


def loaded(folder, kind, older):
    """The policy of a folder in which transformers 4 wrote config.json, and its settings there."""
    random_model(kind).save_pretrained(folder)
    settings = read(folder / "config.json")
    for name in ("rope_parameters", "num_local_experts"):
        settings.pop(name, None)
    settings["torch_dtype"] = settings.pop("dtype")
    (folder / "config.json").write_text(json.dumps(settings | older))
    return load_policy(section(folder), 0), settings | older


@pytest.mark.parametrize(
    ("kind", "older"),
    [
        ("qwen3", {"rope_theta": 1e6, "rope_scaling": None}),
        ("llama", {"rope_theta": 1e6, "rope_scaling": YARN}),
        ("glm", {"rope_theta": 1e6, "partial_rotary_factor": 0.25}),
        ("gemma3_text", {"rope_theta": 1e6, "rope_local_base_freq": 500.0, "rope_scaling": None}),
        ("gpt_neox", {"rotary_emb_base": 1e6, "rotary_pct": 0.5}),
        ("qwen3_moe", {"rope_theta": 1e6, "num_experts": 4}),
        ("falcon_h1", {"rope_theta": 1e6, "rope_scaling": None}),  # infinity among its settings
        ("gpt2", {}),
    ],
)
def test_transformers_4_and_5_read_a_checkpoint_as_the_same_model(tmp_path, kind, older):
    """transformers 4 ignores `rope_parameters`, and took theta 10000."""
    policy, settings = loaded(tmp_path / "own", kind, older)
    write_model(tmp_path / "saved", policy, policy.state_dict(), None)
    saved = read(tmp_path / "saved/config.json")
    # Whatever is still there under a name of transformers 4 has its value.
    given = {n: v for n, v in settings.items() if n != "transformers_version"}
    assert {name: saved.get(name) for name in given} == given
    again = load_policy(section(tmp_path / "saved"), 0)
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, policy(IDS).logits)
    write_model(tmp_path / "twice", again, again.state_dict(), None)  # of a resumed run
    assert read(tmp_path / "twice/config.json") == saved


def test_a_model_of_transformers_5_gets_the_older_names_too(tmp_path):
    random_model("llama", rope_parameters={**YARN, "rope_theta": 5e5}).save_pretrained(tmp_path)
    policy = load_policy(section(tmp_path), 0)
    write_model(tmp_path / "saved", policy, policy.state_dict(), torch.bfloat16)
    saved = read(tmp_path / "saved/config.json")
    assert saved["rope_theta"] == 5e5
    assert {name: saved["rope_scaling"][name] for name in YARN} == YARN
    assert saved["torch_dtype"] == saved["dtype"] == "bfloat16"


def test_changed_rotary_settings_are_not_the_ones_of_the_file(tmp_path):
    """`random_init` may change what config.json says."""
    random_model("llama").save_pretrained(tmp_path)
    settings = read(tmp_path / "config.json")
    del settings["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(settings | {"rope_theta": 1e6}))
    changed = {"rope_parameters": {"rope_type": "default", "rope_theta": 7e4}}
    policy = load_policy(
        ModelSection(**{**section(tmp_path).model_dump(), "random_init": changed}), 0
    )
    write_model(tmp_path / "saved", policy, policy.state_dict(), None)
    assert read(tmp_path / "saved/config.json")["rope_theta"] == 7e4


def test_transformers_4_has_the_class_of_a_tokenizer_and_reads_its_special_tokens(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": ["<think>"]})
    write_tokenizer(tmp_path, tokenizer)
    saved = read(tmp_path / "tokenizer_config.json")
    assert saved["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert saved["additional_special_tokens"] == ["<think>"]
    assert "extra_special_tokens" not in saved  # a mapping in transformers 4
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    again = load_tokenizer(ModelSection(path=str(tmp_path)))
    assert type(again) is type(tokenizer) and again.get_vocab() == tokenizer.get_vocab()
    assert again.all_special_tokens == tokenizer.all_special_tokens


def test_a_run_writes_both_forms(tmp_path):
    shutil.copytree(BASES["tiny"], tmp_path / "base")
    settings = read(tmp_path / "base/config.json")
    del settings["rope_parameters"]
    (tmp_path / "base/config.json").write_text(json.dumps(settings | {"rope_theta": 1e6}))
    run = train_small_run(
        tmp_path / "run", model={"path": str(tmp_path / "base")}, run={"steps": 1},
        eval={"benchmarks": []}, replay={"preset": "grpo"},
    )  # fmt: skip
    saved = run.path / "checkpoints/latest/model"
    assert read(saved / "config.json")["rope_theta"] == 1e6
    assert read(saved / "config.json")["rope_parameters"]["rope_theta"] == 1e6
    tokenizer = read(saved / "tokenizer_config.json")
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"
