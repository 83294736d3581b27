"""The recipe: every setting of a run, validated, in data order.

`load_recipe` returns a `Recipe` from a YAML file (or the name of a shipped one) and `--set`
overrides. Precedence: defaults < file < `--set`. A replay preset decides unit, priority,
composition and on/off; it overrides what earlier layers said about them, and the same or a later
layer may override it again. Importing this package loads neither torch nor transformers.
"""

from grpo_replay.recipe.layers import (
    REPLAY_PRESETS,
    find_recipe,
    load_recipe,
    parse_overrides,
    read_recipe_layer,
    recipe_to_yaml,
    resolve_recipe,
    shipped_recipes_folder,
)
from grpo_replay.recipe.recipe import Recipe
from grpo_replay.recipe.sections import (
    BUILTIN_VERIFIERS,
    AdvantageSection,
    BatchSection,
    CheckpointSection,
    EngineSection,
    EvalSection,
    LossSection,
    ModelSection,
    OptimizerSection,
    PromptsSection,
    ReplaySection,
    RewardSection,
    RunSection,
    SamplingSection,
    Section,
    ServersSection,
    TrackingSection,
    VllmSection,
    ZeroSection,
)

__all__ = [
    "BUILTIN_VERIFIERS",
    "REPLAY_PRESETS",
    "AdvantageSection",
    "BatchSection",
    "CheckpointSection",
    "EngineSection",
    "EvalSection",
    "LossSection",
    "ModelSection",
    "OptimizerSection",
    "PromptsSection",
    "Recipe",
    "ReplaySection",
    "RewardSection",
    "RunSection",
    "SamplingSection",
    "Section",
    "ServersSection",
    "TrackingSection",
    "VllmSection",
    "ZeroSection",
    "find_recipe",
    "load_recipe",
    "parse_overrides",
    "read_recipe_layer",
    "recipe_to_yaml",
    "resolve_recipe",
    "shipped_recipes_folder",
]
