"""Recipes of earlier versions: refused with the new key, or read if a run saved them."""

from pathlib import Path

import pytest
import yaml

from grpo_replay.errors import RecipeError
from grpo_replay.recipe import Recipe, load_recipe, read_recipe_layer, resolve_recipe
from grpo_replay.recipe.base import Passthrough, Section
from grpo_replay.recipe.retired import FIXED, JOINED, MOVED, TRL_AND_VERL
from grpo_replay.storage.recipe_history import read_recipe_file, recipe_to_resume

OLD = Path(__file__).with_name("recipe_of_0.1.yaml")
"""As a run with 166 keys saved it, with other values than the defaults for keys that moved."""


def leaves(section: type[Section], path: str = "") -> list[str]:
    """Dotted keys. A passthrough mapping is one key."""
    if issubclass(section, Passthrough):
        return [path]
    found = []
    for name, field in section.model_fields.items():
        kind, place = field.annotation, f"{path}.{name}".lstrip(".")
        inner = isinstance(kind, type) and issubclass(kind, Section)
        found += leaves(kind, place) if inner else [place]
    return found


def test_a_recipe_has_few_keys():
    keys = leaves(Recipe)
    assert len(keys) == len(set(keys)) <= 110
    assert not {*FIXED, *MOVED, *JOINED} & set(keys)


def test_every_new_name_is_a_key():
    for key in MOVED.values():
        section = Recipe
        for part in key.split(".")[:-1]:
            section = section.model_fields[part].annotation
        assert key.rpartition(".")[2] in section.model_fields


@pytest.mark.parametrize("key", [*FIXED, *MOVED, *JOINED])
def test_every_old_key_is_refused_with_what_became_of_it(key):
    became = MOVED.get(key) or JOINED.get(key) or "is no longer a key: "
    with pytest.raises(RecipeError) as error:
        load_recipe("tiny", [f"{key}=1"])
    assert key in str(error.value) and became in str(error.value)


def test_names_of_trl_and_verl_are_answered_with_ours():
    names = [name for of_key in TRL_AND_VERL.values() for name in of_key.split()]
    assert len(names) == len(set(names)) > 80
    keys = {".".join(key.split(".")[: i + 1]) for key in leaves(Recipe) for i in range(3)}
    assert set(TRL_AND_VERL) - keys <= {
        "sampling.vllm.gpu_memory_utilization", "sampling.vllm.tensor_parallel_size",
    }  # fmt: skip
    for words, expected in (
        (["num_generations=8"], r"'num_generations' \(num_generations is sampling.group_size here"),
        (["loss.epsilon_low=0.1", "sampling.beta=0.1"], "did you mean 'epsilon'"),
        (["sampling.num_generations=8"], "sampling.num_generations is sampling.group_size here"),
        (["actor_rollout_ref.rollout.n=4", "actor_rollout_ref.actor.optim.lr=1e-6"],
         "rollout.n is sampling.group_size here, .*optim.lr is optimizer.learning_rate here"),
        (["custom_reward_function.path=a.py"], "is reward.function here"),
    ):  # fmt: skip
        with pytest.raises(RecipeError, match=expected):
            load_recipe("tiny", words)


def test_every_key_of_the_old_recipe_is_still_one_or_retired():
    with pytest.raises(RecipeError, match=r"is now|is no longer a key"):
        load_recipe(str(OLD))
    resolve_recipe([read_recipe_layer(OLD, saved=True)])


def test_an_old_run_goes_on_with_its_values(tmp_path):
    (tmp_path / "recipe.yaml").write_text(OLD.read_text())
    recipe = read_recipe_file(tmp_path / "recipe.yaml")
    assert recipe == recipe_to_resume(tmp_path, None, ())
    assert (recipe.replay.preset, recipe.replay.composition) == ("fifo", "buffer_only")
    adamw = recipe.optimizer.adamw
    assert (adamw.betas, adamw.eps, adamw.weight_decay) == ([0.8, 0.99], 1e-8, 0.3)
    assert (recipe.engine.offload_optimizer, recipe.engine.offload_parameters) == (True, False)
    assert [(each.function, each.weight) for each in recipe.reward.functions] == [
        ("math_verify", 0.5), ("minerva", 2.0),
    ]  # fmt: skip
    assert not recipe.advantage.divide_by_std
    assert (recipe.sampling.servers.host, recipe.sampling.servers.base_port) == ("10.0.0.1", 8300)
    assert recipe.eval.reward == "math_verify"
    assert recipe.prompts.template == recipe.prompts.chat_template_kwargs
    assert recipe.prompts.chat_template_kwargs == {"enable_thinking": False}
    assert (recipe.prompts.dataset_options.name, recipe.prompts.dataset_options.split) == (
        "main",
        "train",
    )
    assert recipe.sampling.vllm.enable_sleep_mode is False
    assert recipe.engine.zero.sub_group_size == 1_000_000_000


@pytest.mark.parametrize("key", FIXED)
def test_an_old_run_with_a_value_that_is_no_longer_possible_is_refused(tmp_path, key):
    saved = yaml.safe_load(OLD.read_text())
    *parents, leaf = key.split(".")
    section = saved
    for part in parents:
        section = section[part]
    section[leaf] = 7
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(saved))
    with pytest.raises(RecipeError, match=f"{key} 7: .*continue this run with the version"):
        read_recipe_file(tmp_path / "recipe.yaml")


def test_an_old_run_without_replay_stays_without():
    saved = yaml.safe_load(OLD.read_text())
    saved["replay"] |= {"preset": "ours", "enabled": False, "composition": "fresh_anchored"}
    layer = read_recipe_layer_of(saved)
    assert not resolve_recipe([layer]).replays


def read_recipe_layer_of(saved):
    from grpo_replay.recipe.retired import modernised

    return modernised(saved, "recipe.yaml")


def test_passed_on_settings_have_the_type_of_their_default():
    recipe = load_recipe("tiny", ["sampling.vllm.max_num_seqs=7", "engine.zero.sub_group_size=9"])
    assert recipe.sampling.vllm.others == {"max_num_seqs": 7}
    assert recipe.engine.zero.sub_group_size == 9
    for word in ("engine.zero.sub_group_size=true", "optimizer.adamw.eps=small",
                 "engine.zero.stage=2", "sampling.vllm.gpu_memory_utilization=1.5"):  # fmt: skip
        with pytest.raises(RecipeError, match=word.rpartition("=")[0].rpartition(".")[2]):
            load_recipe("tiny", [word])
