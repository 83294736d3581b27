"""What a run starts from: the model and the prompts."""

import string
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, PrivateAttr, field_validator, model_validator

from grpo_replay.recipe.base import GIVEN, Passthrough, Positive, Section

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

ANSWER_MARKER = "####"
"""Where an answer contains it, only the text after the last one is the reference answer."""


class LoraSection(Passthrough):
    """Arguments of `peft.LoraConfig`."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "r": None,
        "lora_alpha": 32,
        "lora_dropout": 0.0,
        "target_modules": None,
    }
    TAKEN: ClassVar[frozenset[str]] = frozenset({"task_type", "inference_mode", "modules_to_save"})

    @model_validator(mode="after")
    def _is_possible(self) -> "LoraSection":
        if self.rank is not None and (type(self.rank) is not int or self.rank < 1):
            raise ValueError(f"r {self.rank!r}: an integer of 1 or more, or null")
        if not (self.alpha > 0 and 0 <= self.dropout < 1 and self.targets != []):
            raise ValueError("lora_alpha is above 0, lora_dropout in [0, 1), target_modules a list")
        return self

    @property
    def rank(self) -> int | None:
        """None if all parameters train."""
        return self.model_extra["r"]  # type: ignore[index]

    @property
    def alpha(self) -> int:
        return self.model_extra["lora_alpha"]  # type: ignore[index]

    @property
    def dropout(self) -> float:
        return self.model_extra["lora_dropout"]  # type: ignore[index]

    @property
    def targets(self) -> list[str] | None:
        return self.model_extra["target_modules"]  # type: ignore[index]


class DatasetOptions(Passthrough):
    """Arguments of `datasets.load_dataset` for a hub dataset."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {"name": None, "revision": None, "split": "train"}
    TAKEN: ClassVar[frozenset[str]] = frozenset({"path", "streaming", "trust_remote_code"})
    TEXT: ClassVar[frozenset[str]] = frozenset(DEFAULTS)

    if TYPE_CHECKING:
        name: str | None = GIVEN
        revision: str | None = GIVEN
        split: str = GIVEN


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
    random_init: bool | dict[str, Any] = False
    """Initialise the weights at random from the configuration, seeded by `run.seed`. No weights are
    read. A mapping replaces values of the configuration, for example `{num_hidden_layers: 2}`."""
    trust_remote_code: bool = False
    """Allow code from the model's repository to run."""
    lora: LoraSection = Field(default_factory=LoraSection)
    """Low-rank adapters (LoRA, arXiv 2106.09685), trained with peft on a frozen base, by peft's own
    names. `r` (null): their rank; all parameters train if null. LoRA needs a higher learning rate
    than full training, about ten times. `lora_alpha` (32): the product of the adapters is
    multiplied by it / r. `target_modules` (null): names of the linear layers that get adapters, all
    but the output head if null. `lora_dropout` (0): dropout of the adapters' input, in updates
    only; its masks depend on the number of ranks, and the ratio of a fresh rollout is then not
    exactly 1."""
    _fp32_head: bool = PrivateAttr(default=False)

    @field_validator("random_init")
    @classmethod
    def _is_asked_for(cls, given: bool | dict[str, Any]) -> bool | dict[str, Any]:
        return given or not isinstance(given, bool)

    @property
    def config_overrides(self) -> dict[str, Any]:
        """Values that replace those of the model's configuration."""
        return self.random_init if isinstance(self.random_init, dict) else {}

    @property
    def fp32_head(self) -> bool:
        """True if `sampling.vllm` asks for logits in fp32: trainer and samplers compute alike."""
        return self._fp32_head


class PromptSource(Section):
    """One of several sources of prompts. What is null is as in the section."""

    source: str
    weight: Annotated[float, Field(gt=0)] = 1.0
    dataset_options: DatasetOptions | None = None
    problem_field: str | None = None
    answer_field: str | None = None
    id_field: str | None = None


class PromptsSection(Section):
    source: str | Annotated[list[PromptSource], Field(min_length=1)] = "builtin:tiny"
    """Hugging Face dataset id; a local file: JSON lines, JSON array, CSV, TSV, Parquet, Arrow, also
    compressed (`.jsonl.gz`); a folder of such files or of `save_to_disk`; one of `builtin:tiny`,
    `builtin:tiny-long`, `builtin:additions`, `builtin:step-sums` and `builtin:word-problems`.
    Several: a list of them or of `{source: …, weight: 1.0}`, which may have `dataset_options`,
    `problem_field`, `answer_field` and `id_field` of their own. `weight` is how often an epoch
    visits each problem of the source: 0.5 visits half of them, the others next time."""
    dataset_options: DatasetOptions = Field(default_factory=DatasetOptions)
    """Of a hub dataset: `name` (configuration; null), `revision` (null) and `split` (train), or a
    slice of one: `train[:-500]` is all but the last 500 rows. Others are arguments of
    `datasets.load_dataset`, and of `pandas.read_csv` for a CSV file (`{sep: ";"}`)."""
    problem_field: str = "problem"
    """Column with the problem: text, or a list of chat messages `{role, content}` (TRL, verl:
    `prompt`), which are rendered as they are, without `system_prompt` and `user_template`. For all
    fields, dots lead into a nested value: `reward_model.ground_truth`. If there is no column
    `problem`: `prompt`, `question` or `messages`."""
    answer_field: str = "answer"
    """Column with the reference answer: text or a number. Where it contains `####`, only the text
    after the last one is the answer (GSM8K: `… #### 18`). If there is no column `answer`:
    `reward_model.ground_truth` (verl), `ground_truth` (open-instruct) or `solution` (TRL)."""
    id_field: str | None = None
    """Column with a unique id. The row number is the id if null."""
    template: Literal["chat", "plain"] | dict[str, Any] = "chat"
    """`chat` renders the tokenizer's chat template, and so does a mapping of variables for it, such
    as `{enable_thinking: false}`; `plain` formats only `user_template`."""
    system_prompt: str | None = PAPER_SYSTEM_PROMPT
    """System message of the chat template. No system message if null. Ignored by `plain`."""
    user_template: str = PAPER_USER_TEMPLATE
    """Python format string with the placeholder `{problem}`."""
    max_prompt_length: Positive = 1024
    """Maximum prompt length in tokens. Longer prompts are skipped and counted (TRL:
    max_prompt_length)."""

    @field_validator("template")
    @classmethod
    def _leaves_the_call_alone(cls, template: str | dict[str, Any]) -> str | dict[str, Any]:
        taken = sorted(RENDERING_ARGUMENTS & set(template)) if isinstance(template, dict) else []
        if taken:
            raise ValueError(f"{', '.join(taken)}: not a variable of the chat template; remove it")
        return template

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

    @field_validator("source", mode="before")
    @classmethod
    def _names_alone(cls, source: Any) -> Any:
        """Sources of a list that are only named."""
        if not isinstance(source, list):
            return source
        return [{"source": each} if isinstance(each, str) else each for each in source]

    @field_validator("source")
    @classmethod
    def _are_distinct(cls, source: Any) -> Any:
        whole = [] if isinstance(source, str) else [(e.source, e.dataset_options) for e in source]
        if twice := [each for each in whole if whole.count(each) > 1]:
            raise ValueError(f"{twice[0][0]} is named twice: name it once, with a weight")
        return source

    @property
    def sources(self) -> "tuple[PromptsSection, ...]":
        """A section for each source, with the fields of that source."""
        if isinstance(self.source, str):
            return (self,)
        names = ("source", "dataset_options", "problem_field", "answer_field", "id_field")
        given = ({name: getattr(each, name) for name in names} for each in self.source)
        return tuple(
            self.model_copy(update={k: v for k, v in each.items() if v is not None})
            for each in given
        )

    @property
    def source_names(self) -> tuple[str, ...]:
        return tuple(str(each.source) for each in self.sources)

    @property
    def weights(self) -> tuple[float, ...]:
        """Of each source: how often an epoch visits its problems."""
        return (1.0,) if isinstance(self.source, str) else tuple(e.weight for e in self.source)

    @property
    def in_chat(self) -> bool:
        """True if prompts are rendered by the tokenizer's chat template."""
        return self.template != "plain"

    @property
    def chat_template_kwargs(self) -> dict[str, Any]:
        """Variables for the chat template."""
        return self.template if isinstance(self.template, dict) else {}

    @property
    def config_name(self) -> str | None:
        return self.dataset_options.name

    @property
    def revision(self) -> str | None:
        return self.dataset_options.revision

    @property
    def split(self) -> str:
        return self.dataset_options.split
