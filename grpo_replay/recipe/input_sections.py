"""What a run starts from: the model and the prompts."""

import string
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from grpo_replay.recipe.base import Positive, Section

PAPER_SYSTEM_PROMPT = "You are a helpful assistant."
PAPER_USER_TEMPLATE = (
    "Problem: {problem}\n\n"
    "Please reason step by step, and put your final answer within \\boxed{{}}."
)

RENDERING_ARGUMENTS = frozenset(
    (
        *("conversation", "tools", "documents", "chat_template", "add_generation_prompt"),
        *("continue_final_message", "tokenize", "padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    )
)
"""Arguments of transformers' `apply_chat_template` that are not variables of the template."""


class LoraSection(Section):
    """Low-rank adapters (LoRA, arXiv 2106.09685), trained with peft on a frozen base."""

    rank: Positive | None = None
    """Rank r of the adapters (peft: r). All parameters train if null. LoRA needs a higher learning
    rate than full training, about ten times."""
    alpha: Positive = 32
    """α: the product of the adapters is multiplied by α / r (peft: lora_alpha)."""
    targets: Annotated[list[str], Field(min_length=1)] | None = None
    """Names of the linear layers that get adapters, for example `[q_proj, v_proj]`. All but the
    output head if null (peft: target_modules)."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout of the adapters' input, in updates only (peft: lora_dropout). Its masks depend on
    the number of ranks; the ratio of a fresh rollout is then not exactly 1."""


class ModelSection(Section):
    path: str = "builtin:tiny"
    """Hugging Face model id, local folder, `builtin:tiny` or `builtin:tiny-long`. With
    `random_init` also a published configuration that ships with the package:
    `builtin:qwen3-0.6b`, `builtin:qwen3-1.7b`, `builtin:qwen3-4b` or `builtin:qwen2.5-7b`."""
    revision: str | None = None
    """Git revision of the model on the hub. The default branch if null."""
    tokenizer: str | None = None
    """Tokenizer id, local folder, or `builtin:bytes`. The model's own tokenizer if null."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute precision of the policy. With bfloat16 the optimizer keeps fp32 master weights."""
    attn_implementation: Literal[
        "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"
    ] = "sdpa"
    """Attention implementation of the trainer, by its name in transformers. The last three need a
    GPU."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory (TRL: gradient_checkpointing)."""
    random_init: bool = False
    """Initialise the weights at random from the configuration, seeded by `run.seed`. No weights are
    read."""
    config_overrides: dict[str, Any] = Field(default_factory=dict)
    """Values that replace those of the model's configuration, for example
    `{num_hidden_layers: 2}`. Needs `random_init`."""
    trust_remote_code: bool = False
    """Allow code from the model's repository to run."""
    lora: LoraSection = Field(default_factory=LoraSection)
    """Train low-rank adapters instead of all parameters."""


class PromptsSection(Section):
    source: str = "builtin:tiny"
    """Hugging Face dataset id, local JSONL or Parquet file, `builtin:tiny` or
    `builtin:tiny-long`."""
    config_name: str | None = None
    """Configuration of the dataset on the hub. The default configuration if null."""
    revision: str | None = None
    """Git revision of the dataset on the hub. The default branch if null."""
    split: str = "train"
    """Split of the hub dataset, or a slice of one: `train[:-500]` is all but the last 500 rows."""
    problem_field: str = "problem"
    """Column with the problem: text, or a list of chat messages `{role, content}` (TRL, verl:
    `prompt`), which are rendered as they are, without `system_prompt` and `user_template`. For all
    fields, dots lead into a nested value: `reward_model.ground_truth`."""
    answer_field: str = "answer"
    """Column with the reference answer: text or a number."""
    answer_marker: Annotated[str | None, Field(min_length=1)] = "####"
    """Where an answer contains this marker, only the text after the last one is the reference
    answer (GSM8K: `… #### 18`). Whole answers if null."""
    id_field: str | None = None
    """Column with a unique id. The row number is the id if null."""
    template: Literal["chat", "plain"] = "chat"
    """`chat` renders the tokenizer's chat template; `plain` formats only `user_template`."""
    system_prompt: str | None = PAPER_SYSTEM_PROMPT
    """System message of the chat template. No system message if null. Ignored by `plain`."""
    user_template: str = PAPER_USER_TEMPLATE
    """Python format string with the placeholder `{problem}`."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables for the chat template, for example `{enable_thinking: false}` (TRL:
    chat_template_kwargs)."""
    max_prompt_length: Positive = 1024
    """Maximum prompt length in tokens. Longer prompts are skipped and counted (TRL:
    max_prompt_length)."""
    shuffle: bool = True
    """Visit the prompts in a new random order every epoch, seeded by `run.seed`."""
    limit: Positive | None = None
    """Use only this many rows from the start. All rows if null."""

    @field_validator("chat_template_kwargs")
    @classmethod
    def _leaves_the_call_alone(cls, variables: dict[str, Any]) -> dict[str, Any]:
        taken = sorted(RENDERING_ARGUMENTS & set(variables))
        if taken:
            raise ValueError(f"{', '.join(taken)}: not a variable of the chat template; remove it")
        return variables

    @field_validator("user_template")
    @classmethod
    def _has_one_placeholder(cls, template: str) -> str:
        remedy = "the only placeholder is {problem}; other braces are written twice, {{ and }}"
        try:
            fields = {field for _, field, _, _ in string.Formatter().parse(template)} - {None}
            template.format(problem="")
        except (LookupError, ValueError, AttributeError) as error:
            raise ValueError(f"{error!r}; {remedy}") from None
        if fields != {"problem"}:
            raise ValueError(f"it must contain {{problem}}; {remedy}")
        return template
