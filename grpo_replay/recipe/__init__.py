"""The recipe: every setting of a run, validated.

`load_recipe` reads a YAML file (or a shipped recipe by its name) and `--set` overrides. Precedence:
defaults < file < `--set`. A replay preset sets several keys of `replay`; it overrides lower layers,
and the same or a higher layer may override it. Imports errors and types; neither torch nor
transformers.
"""

from grpo_replay.recipe.base import Section
from grpo_replay.recipe.grpo_sections import (
    REPLAY_PRESETS,
    AdvantageSection,
    BatchSection,
    LossSection,
    Machines,
    OptimizerSection,
    RatioBounds,
    ReplaySection,
    RewardSection,
    SamplerRatio,
)
from grpo_replay.recipe.input_sections import (
    LoraSection,
    ModelSection,
    PromptsSection,
    SamplingSection,
    ServersSection,
    VllmSection,
)
from grpo_replay.recipe.layers import (
    ReplayConfig,
    find_recipe,
    load_recipe,
    parse_overrides,
    read_recipe_layer,
    recipe_source,
    recipe_to_yaml,
    resolve_recipe,
)
from grpo_replay.recipe.open_lists import BUILTIN_VERIFIERS
from grpo_replay.recipe.recipe import Recipe
from grpo_replay.recipe.run_sections import (
    CheckpointSection,
    EngineSection,
    EvalSection,
    RunSection,
    TrackingSection,
    ZeroSection,
)
from grpo_replay.shipped_recipes import shipped_recipes_folder

__all__ = [
    "BUILTIN_VERIFIERS",
    "REPLAY_PRESETS",
    "AdvantageSection",
    "BatchSection",
    "CheckpointSection",
    "EngineSection",
    "EvalSection",
    "LoraSection",
    "LossSection",
    "Machines",
    "ModelSection",
    "OptimizerSection",
    "PromptsSection",
    "RatioBounds",
    "Recipe",
    "ReplayConfig",
    "ReplaySection",
    "RewardSection",
    "RunSection",
    "SamplerRatio",
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
    "recipe_source",
    "recipe_to_yaml",
    "resolve_recipe",
    "shipped_recipes_folder",
]
