"""`train --smoke`: what it changes in a recipe."""

from grpo_replay.cli.smoke import smoke_settings
from grpo_replay.recipe import load_recipe
from grpo_replay.shipped_recipes import shipped_recipes


def test_every_shipped_recipe_can_be_tried_in_three_steps():
    for name in shipped_recipes():
        recipe = load_recipe(name)
        tried = load_recipe(name, smoke_settings(recipe))
        assert (tried.run.steps, tried.checkpoint.every_steps) == (3, 2)
        same = {"sampling", "model", "batch", "loss", "prompts", "reward"}
        assert tried.model_dump(include=same) == recipe.model_dump(include=same)
