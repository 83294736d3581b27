"""The recipe: every setting of a run, validated.

`load_recipe` reads a YAML file (or a shipped recipe by its name) and `--set` overrides. Precedence:
defaults < file < `--set`. A replay preset sets several keys of `replay`; it overrides lower layers,
and the same or a higher layer may override it. Imports errors and types, but neither torch nor
transformers.
"""

from grpo_replay.recipe.base import Section as Section
from grpo_replay.recipe.grpo_sections import (
    REPLAY_PRESETS as REPLAY_PRESETS,
    AdvantageSection as AdvantageSection,
    BatchSection as BatchSection,
    LossSection as LossSection,
    Machines as Machines,
    OptimizerSection as OptimizerSection,
    RatioBounds as RatioBounds,
    ReplaySection as ReplaySection,
    RewardSection as RewardSection,
    SamplerRatio as SamplerRatio,
)
from grpo_replay.recipe.input_sections import (
    LoraSection as LoraSection,
    ModelSection as ModelSection,
    PromptsSection as PromptsSection,
    SamplingSection as SamplingSection,
    ServersSection as ServersSection,
    VllmSection as VllmSection,
)
from grpo_replay.recipe.layers import (
    ReplayConfig as ReplayConfig,
    find_recipe as find_recipe,
    load_recipe as load_recipe,
    parse_overrides as parse_overrides,
    read_recipe_layer as read_recipe_layer,
    recipe_source as recipe_source,
    recipe_to_yaml as recipe_to_yaml,
    resolve_recipe as resolve_recipe,
)
from grpo_replay.recipe.open_lists import BUILTIN_VERIFIERS as BUILTIN_VERIFIERS
from grpo_replay.recipe.recipe import Recipe as Recipe
from grpo_replay.recipe.run_sections import (
    CheckpointSection as CheckpointSection,
    EngineSection as EngineSection,
    EvalSection as EvalSection,
    RunSection as RunSection,
    TrackingSection as TrackingSection,
    ZeroSection as ZeroSection,
)
from grpo_replay.shipped_recipes import shipped_recipes_folder as shipped_recipes_folder
