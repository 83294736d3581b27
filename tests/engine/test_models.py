"""Models and tokenizers: what loads, and what is said about what does not."""

import json
import re
import shutil
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_replay.engine.models import (
    EOS_ID,
    PAD_ID,
    base_digest,
    byte_tokenizer,
    drop_unwritable_settings,
    eos_token_ids,
    load_config,
    load_policy,
    load_tokenizer,
    resolve_model_path,
)
from grpo_replay.errors import ModelError, RecipeError
from grpo_replay.recipe import ModelSection

SMALL = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 32,
}


def random_section(**changes):
    values = {
        "path": "builtin:qwen3-0.6b",
        "tokenizer": "builtin:bytes",
        "random_init": SMALL,
    }
    return ModelSection(**{**values, **changes})


@pytest.fixture
def folder(tmp_path):
    """A complete model folder with the byte tokenizer."""
    policy = load_policy(random_section(), 3)
    policy.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Whoever reaches for the network fails at once, and is seen."""

    def refuse(*args, **kwargs):
        raise AssertionError("a network connection was opened")

    monkeypatch.setattr("socket.create_connection", refuse)
    monkeypatch.setattr("socket.socket.connect", refuse)


def test_the_byte_tokenizer_has_special_tokens_and_a_chat_template():
    tokenizer = byte_tokenizer()
    assert (len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id) == (258, PAD_ID, EOS_ID)
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": "1+1"}]
    round_trip = "héllo\n\t 漢字 🙂"
    assert tokenizer.decode(tokenizer(round_trip)["input_ids"]) == round_trip
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "system: S\nuser: 1+1\nassistant: "
    assert tokenizer.decode([65, EOS_ID], skip_special_tokens=True) == "A"


def test_the_tiny_model_loads_with_tokenizer_and_stop_token():
    section = ModelSection(path="builtin:tiny")
    policy, tokenizer = load_policy(section, 0), load_tokenizer(section)
    assert not policy.training
    assert policy.config.vocab_size == len(tokenizer)
    assert eos_token_ids(section, tokenizer) == (tokenizer.eos_token_id,)
    assert eos_token_ids("builtin:tiny", tokenizer) == (tokenizer.eos_token_id,)
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_a_random_initialisation_is_a_function_of_its_seed_and_leaves_the_random_state():
    before = torch.get_rng_state()
    first, again, other = (load_policy(random_section(), seed) for seed in (5, 5, 6))
    assert torch.equal(before, torch.get_rng_state())
    name = "model.layers.2.mlp.up_proj.weight"
    weights = [policy.state_dict()[name] for policy in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_random_initialisation_takes_dtype_overrides_and_special_tokens():
    policy = load_policy(random_section(dtype="bfloat16", attn_implementation="eager"), 0)
    assert policy.dtype == torch.bfloat16
    assert policy.config._attn_implementation == "eager"
    assert policy.config.num_hidden_layers == len(policy.config.layer_types) == 3
    assert (policy.config.eos_token_id, policy.config.pad_token_id) == (EOS_ID, PAD_ID)
    assert policy.generation_config.eos_token_id == EOS_ID


def test_a_saved_folder_loads_bit_for_bit(folder):
    saved = load_policy(random_section(), 3).state_dict()
    loaded = load_policy(ModelSection(path=str(folder)), 9).state_dict()
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    tokenizer = load_tokenizer(ModelSection(path=str(folder)))
    assert eos_token_ids(str(folder), tokenizer) == (EOS_ID,)


def test_generation_settings_that_transformers_cannot_write_do_not_stop_a_checkpoint(
    folder, tmp_path
):
    """Published models have such files; transformers reads them, and raises when it saves."""
    settings = {"temperature": 0.6, "eos_token_id": 9, "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    policy = load_policy(ModelSection(path=str(folder)), 0)
    (notice,) = drop_unwritable_settings(policy)
    assert "only the special tokens" in notice
    policy.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert (saved["eos_token_id"], saved["pad_token_id"]) == (9, 0)
    assert not saved.get("do_sample") and "temperature" not in saved


@pytest.mark.parametrize(
    ("kind", "setting"), [("qwen3", "attention_dropout"), ("gpt2", "resid_pdrop")]
)  # fmt: skip
def test_a_row_has_the_same_log_probs_in_every_forward_pass(tmp_path, kind, setting):
    """Dropout of the model's own would make ratios noise."""
    small = {
        "vocab_size": 300,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
    }
    config = AutoConfig.for_model(kind, **small, **{setting: 0.5})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    section = ModelSection(path=str(tmp_path))
    policy = load_policy(section, 0).train()
    ids = torch.arange(12)[None]
    assert torch.equal(policy(ids).logits, policy(ids).logits)
    assert getattr(policy.config, setting) == 0.5


def test_stop_tokens_are_those_of_tokenizer_and_generation_config(folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [12, 9]}))
    tokenizer = load_tokenizer(ModelSection(path=str(folder)))
    assert eos_token_ids(str(folder), tokenizer) == (9, 12, EOS_ID)
    other = ModelSection(path=str(folder), tokenizer="builtin:bytes")
    assert eos_token_ids(other, tokenizer) == (EOS_ID,)


def test_a_tokenizer_without_a_pad_token_pads_with_eos(folder):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["pad_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(ModelSection(path=str(folder))).pad_token_id == EOS_ID


def test_a_tokenizer_without_eos_is_refused(folder):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="no EOS token"):
        load_tokenizer(ModelSection(path=str(folder)))


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_damaged_file_is_a_model_error(folder, file):
    (folder / file).write_text('{"broken')
    with pytest.raises(ModelError, match=r"cannot be (loaded|read)") as caught:
        load_policy(ModelSection(path=str(folder)), 0)
    assert str(folder) in str(caught.value)


def test_weights_with_too_few_layers_are_not_topped_up_at_random(folder):
    config = json.loads((folder / "config.json").read_text())
    config.update(num_hidden_layers=4, layer_types=["full_attention"] * 4)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"lack 11 tensors.*model\.layers\.3"):
        load_policy(ModelSection(path=str(folder)), 0)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_layers": 3}, "num_layers: qwen3 has no such setting .did you mean 'num_hidden_la"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "not a multiple of"),
    ],
)
def test_overrides_that_the_configuration_cannot_take_are_recipe_errors(overrides, message):
    with pytest.raises(RecipeError, match=message):
        load_config(random_section(random_init=overrides))


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused_and_random_weights_may_have_more():
    random = random_section(random_init={**SMALL, "vocab_size": 257})
    pretrained = ModelSection(path="builtin:tiny", tokenizer="builtin:bytes")
    for section in (random, pretrained):
        with pytest.raises(ModelError, match=r"has 258 tokens, but .* vocab_size \d+") as caught:
            load_policy(section, 0)
        assert ("random_init" in str(caught.value)) == bool(section.random_init)


def test_paths_that_do_not_exist():
    with pytest.raises(ModelError, match="no such builtin model; there are: builtin:tiny"):
        resolve_model_path("builtin:huge")
    assert resolve_model_path("Qwen/Qwen3-4B") == "Qwen/Qwen3-4B"
    for path in ("/no/such/model", "./no-model", "~/no-model", "a/b/c"):
        with pytest.raises(ModelError, match="no such folder"):
            load_config(ModelSection(path=path))


def test_a_folder_that_holds_a_model_is_named(tmp_path, folder):
    run, adapters = tmp_path / "run", tmp_path / "adapters"
    shutil.copytree(folder, run / "checkpoints/step_000002/model")
    adapters.mkdir()
    (adapters / "adapter_config.json").write_text("{}")
    model = run / "checkpoints/step_000002/model"
    for place, words in (
        (run, f"set it to {model}"),
        (run / "checkpoints/step_000002", f"set it to {model}"),
        (adapters, "adapters alone: merge them"),
        (run / "checkpoints", "model.path is a model's folder"),
    ):
        for load in (load_tokenizer, load_config):
            with pytest.raises(ModelError, match=re.escape(words)):
                load(ModelSection(path=str(place)))


def test_a_base_is_known_wherever_it_lies_and_in_any_dtype(tmp_path):
    model = load_policy(ModelSection(path="builtin:tiny"), 0)
    model.save_pretrained(tmp_path)
    load_tokenizer(ModelSection(path="builtin:tiny")).save_pretrained(tmp_path)
    digests = [base_digest(model)]
    for dtype in ("float32", "bfloat16"):
        moved = load_policy(ModelSection(path=str(tmp_path), dtype=dtype), 0)
        assert base_digest(moved) == digests[0]
    for name in ("model.norm.weight", "model.layers.1.mlp.up_proj.weight"):
        with torch.no_grad():
            model.get_parameter(name).view(-1)[:20] += 0.5
        digests.append(base_digest(model))
    digests += [base_digest(load_policy(random_section(), seed)) for seed in (1, 2)]
    assert len(set(digests)) == 5
    assert base_digest(load_policy(random_section(), 2)) == digests[-1]


def test_an_attention_that_the_model_does_not_have_is_a_recipe_error(tmp_path):
    small = {"vocab_size": 258, "hidden_size": 16, "n_head": 2, "n_layer": 1}
    config = AutoConfig.for_model("bloom", **small)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    for random_init in (False, True):
        section = ModelSection(path=str(tmp_path), random_init=random_init)
        with pytest.raises(RecipeError, match=r"implementation sdpa: .*Bloom.* eager fits every"):
            load_policy(section, 0)
    eager = ModelSection(path=str(tmp_path), attn_implementation="eager")
    assert load_policy(eager, 0).config.model_type == "bloom"


def test_soft_caps_of_attention_scores_need_eager_attention(tmp_path):
    AutoConfig.for_model("gemma2").save_pretrained(tmp_path)
    section = ModelSection(path=str(tmp_path), tokenizer="builtin:bytes", random_init=True)
    with pytest.raises(RecipeError, match=r"attn_logit_softcapping 50\.0\); set it to eager"):
        load_policy(section, 0)


def test_a_model_of_text_and_images_is_refused_by_name(tmp_path):
    AutoConfig.for_model("gemma3").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"gemma3 is not a model of text alone .*gemma3_text"):
        load_config(ModelSection(path=str(tmp_path)))


def test_weights_that_need_a_package_do_not_blame_the_attention(tmp_path):
    model = ModelSection(path="builtin:tiny")
    load_policy(model, 0).save_pretrained(tmp_path)
    load_tokenizer(model).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    four_bit = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": four_bit}))
    with pytest.raises(ModelError, match="quantised") as raised:
        load_policy(ModelSection(path=str(tmp_path)), 0)
    assert str(tmp_path) in str(raised.value) and "bitsandbytes" in str(raised.value)
    assert "attn_implementation" not in str(raised.value)
    with pytest.raises(RecipeError, match="attn_implementation flash_attention_2: FlashAttention"):
        load_policy(ModelSection(path="builtin:tiny", attn_implementation="flash_attention_2"), 0)


@pytest.mark.slow
def test_a_python_that_drops_docstrings_is_named():
    """transformers reads its own docstrings; the commands that need no model still run."""
    words = ([sys.executable, "-OO", "-m", "grpo_replay", *each.split()] for each in (
        "train tiny --dry-run", "aes --reference 1,2 --candidate a=1,2",
    ))  # fmt: skip
    refused, done = (subprocess.run(each, capture_output=True, text=True) for each in words)
    assert refused.returncode == 2 and refused.stderr.count("PYTHONOPTIMIZE is 2") == 1
    assert "Traceback" not in refused.stderr
    assert done.returncode == 0, done.stderr
