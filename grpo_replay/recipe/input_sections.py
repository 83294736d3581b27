"""Sections of the model, the prompts and the sampling, with in-process vLLM and vLLM servers."""

import datetime
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from grpo_replay.recipe.base import (
    MIN_TEMPERATURE,
    Passthrough,
    Positive,
    Seconds,
    Section,
    distinct,
    one_of,
    whole_characters,
)
from grpo_replay.recipe.open_lists import SAMPLERS, SamplerFacts

PAPER_SYSTEM_PROMPT = "You are a helpful assistant."
PAPER_USER_TEMPLATE = (
    "Problem: {problem}\n\n"
    "Please reason step by step, and put your final answer within \\boxed{{}}."
)

GYM = "reasoning_gym:"
"""Prefix of prompt sources that reasoning-gym generates."""

ANSWER_MARKER = "####"
"""Marker in answers: only the text after the last one is the reference answer."""


class LoraSection(Passthrough):
    """Arguments of `peft.LoraConfig` (docs/scaling.md). With `r` null all parameters train. LoRA
    needs about ten times the learning rate of full training. With `target_modules` null every
    linear layer but the output head gets an adapter."""

    RESERVED: ClassVar[frozenset[str]] = frozenset(
        {"task_type", "inference_mode", "modules_to_save"}
    )

    r: Positive | None = None
    lora_alpha: Positive = 32
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    target_modules: Annotated[list[str], Field(min_length=1)] | None = None


class DatasetOptions(Passthrough):
    """Arguments of `datasets.load_dataset`. `split` may be a slice, `train[:-500]`, not of JSON;
    `sep` and `encoding` are for CSV."""

    RESERVED: ClassVar[frozenset[str]] = frozenset({"path", "streaming", "trust_remote_code"})

    name: str | None = None
    revision: str | None = None
    split: str = "train"


class ModelSection(Section):
    path: str = "builtin:tiny"
    """Hugging Face id, local folder, `builtin:tiny` or `builtin:tiny-long`. With `random_init` also
    a configuration that ships: `builtin:qwen3-0.6b`, `builtin:qwen3-1.7b`, `builtin:qwen3-4b`,
    `builtin:qwen2.5-7b`."""
    revision: str | None = None
    """Git revision on the hub; null: the default branch."""
    tokenizer: str | None = None
    """Tokenizer id, local folder or `builtin:bytes`; null: the model's own."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute precision. With bfloat16 the optimizer keeps fp32 master weights."""
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3"] = "sdpa"
    """The trainer's attention, by its name in transformers. The last two need a GPU."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    compile: bool | Literal["auto"] = "auto"
    """Compile decoder layers and the output head with `torch.compile`, at ZeRO 0 to 2. `auto`: on a
    GPU, unless the model breaks or has other log-probs; with true that is refused."""
    random_init: bool | dict[str, Any] = False
    """Random weights, seeded by `run.seed`, for `sampling.backend` `hf`; none are read. A mapping
    replaces values of the configuration: `{num_hidden_layers: 2}`."""
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

    @field_validator("random_init")
    @classmethod
    def _empty_mapping_is_true(cls, value: bool | dict[str, Any]) -> bool | dict[str, Any]:
        return value or not isinstance(value, bool)

    @property
    def config_overrides(self) -> dict[str, Any]:
        """The mapping of `random_init`: values that replace those of the model's configuration."""
        return self.random_init if isinstance(self.random_init, dict) else {}


class PromptSource(Section):
    """One of several sources of prompts. Null fields take the value of the section."""

    source: str
    weight: Annotated[float, Field(gt=0)] = 1.0
    dataset_options: DatasetOptions | None = None
    problem_field: str | None = None
    answer_field: str | None = None
    id_field: str | None = None


class PromptsSection(Section):
    source: str | Annotated[list[PromptSource], Field(min_length=1)] = "builtin:tiny"
    """Hugging Face dataset id; a JSON, JSON lines, CSV, TSV or Parquet file; a `save_to_disk`
    folder; `builtin:tiny`, `builtin:tiny-long`, `builtin:additions` or `builtin:step-sums`;
    `reasoning_gym:NAME`. Several: a list of these or of `{source: …, weight: 1.0}`, which may have
    fields of their own. `weight`: how often an epoch visits each problem."""
    dataset_options: DatasetOptions = Field(default_factory=DatasetOptions)
    """Of a hub dataset: `name` (configuration; null), `revision` (null) and `split` (train), or a
    slice of one: `train[:-500]` is all but the last 500 rows, of a CSV or Parquet file too. Others
    are arguments of `datasets.load_dataset`, for a CSV file `sep` (found in its header if it is a
    comma, a semicolon or a tab) and `encoding`, for `reasoning_gym:NAME` the family's settings and
    `size` (1000)."""
    problem_field: str = "problem"
    """Column with the problem: text, or chat messages. In all fields, dots lead into a nested value
    and capitals do not count. If there is no column `problem`: `prompt`, `question` or
    `messages`."""
    answer_field: str = "answer"
    """Column with the reference answer; where it contains `####`, the text after the last one. If
    there is no column `answer`: `reward_model.ground_truth`, `ground_truth` or `solution`."""
    id_field: str | None = None
    """Column with a unique id; null: the row number."""
    template: Literal["chat", "plain"] | dict[str, Any] = "chat"
    """`chat`, or a mapping of variables such as `{enable_thinking: false}`, renders the tokenizer's
    chat template; `plain` formats only `user_template`."""
    date: str = "2024-07-26"
    """What a chat template that prints today's date prints instead (Llama, Granite, gpt-oss), so
    that prompts are the same on every day, on every rank and in every evaluation."""
    system_prompt: str | None = PAPER_SYSTEM_PROMPT
    """System message of the chat template. If null, none, unless the template inserts its own
    (SmolLM2's does). Ignored by `plain`."""
    user_template: str = PAPER_USER_TEMPLATE
    """Python format string with the placeholder `{problem}`."""
    max_prompt_length: Positive = 1024
    """Maximum tokens of a prompt; longer ones are skipped and counted."""

    @field_validator("template", "system_prompt", "user_template")
    @classmethod
    def _is_whole(cls, text: Any) -> Any:
        return whole_characters(text)

    @field_validator("date")
    @classmethod
    def _is_a_date(cls, date: str) -> str:
        try:
            return datetime.date.fromisoformat(date).isoformat()
        except ValueError as error:
            raise ValueError(f"{error}; expected year, month and day: 2024-07-26") from None

    @field_validator("user_template")
    @classmethod
    def _has_one_placeholder(cls, template: str) -> str:
        """Refuses a template without `{problem}` or with other placeholders."""
        remedy = "the only placeholder is {problem}; other braces are written twice, {{ and }}"
        try:
            filled = template.format(problem="\0")
        except (LookupError, ValueError, AttributeError) as error:
            raise ValueError(f"{error}: {remedy}") from None
        if "\0" not in filled:
            raise ValueError(f"it must contain {{problem}}; {remedy}")
        return template

    @field_validator("source", mode="before")
    @classmethod
    def _expand_bare_names(cls, source: Any) -> Any:
        """Turn names in a list into mappings."""
        if not isinstance(source, list):
            return source
        return [{"source": item} if isinstance(item, str) else item for item in source]

    @property
    def sources(self) -> "tuple[PromptsSection, ...]":
        """A section for each source, with its own fields; this section itself for a single one."""
        if isinstance(self.source, str):
            return (self,)
        names = ("source", "dataset_options", "problem_field", "answer_field", "id_field")
        updates = ({name: getattr(source, name) for name in names} for source in self.source)
        return tuple(
            self.model_copy(update={k: v for k, v in update.items() if v is not None})
            for update in updates
        )

    @property
    def source_names(self) -> tuple[str, ...]:
        return tuple(str(section.source) for section in self.sources)

    @property
    def weights(self) -> tuple[float, ...]:
        """How often an epoch visits the problems of each source."""
        if isinstance(self.source, str):
            return (1.0,)
        return tuple(source.weight for source in self.source)

    @property
    def in_chat(self) -> bool:
        """True if prompts are rendered by the tokenizer's chat template."""
        return self.template != "plain"

    @property
    def chat_template_kwargs(self) -> dict[str, Any]:
        """Variables for the chat template."""
        return self.template if isinstance(self.template, dict) else {}


class VllmSection(Passthrough):
    """vLLM's engine arguments, in process and for launched servers. `gpu_memory_utilization` is
    ignored on a CPU; `tensor_parallel_size` must divide the ranks on a node; `max_model_len` null:
    from the length limits; `dtype` auto: the policy's; `enable_sleep_mode` frees GPU memory during
    training. `hf_overrides: {head_dtype: float32}` computes logits in fp32, in samplers and
    trainer: their log-probs then differ less."""

    RESERVED: ClassVar[frozenset[str]] = frozenset(
        (
            *("model", "revision", "trust_remote_code", "logprobs_mode", "skip_tokenizer_init"),
            *("generation_config", "seed", "tokenizer"),
        )
    )

    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.6
    tensor_parallel_size: Positive = 1
    max_model_len: Positive | None = None
    enforce_eager: bool = False
    async_scheduling: bool | None = None
    enable_prefix_caching: bool = True
    enable_sleep_mode: bool = True
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"

    @model_validator(mode="after")
    def _has_a_known_head(self) -> "VllmSection":
        overrides = self.extra_settings.get("hf_overrides", {})
        if not isinstance(overrides, dict) or self.head_dtype not in (None, "model", "float32"):
            raise ValueError("hf_overrides is a mapping, its head_dtype float32 or model")
        return self

    @property
    def head_dtype(self) -> str | None:
        """Precision of the output head, by vLLM's name; None if not set."""
        return self.extra_settings.get("hf_overrides", {}).get("head_dtype")


class ServersSection(Section):
    urls: list[str] = Field(default_factory=list)
    """Running vLLM servers, as `http://10.0.0.5:8000`."""
    launch: Annotated[int, Field(ge=0)] = 0
    """Number of servers to start on this machine. They stop with the run."""
    address: str = "127.0.0.1:8300"
    """Where launched servers listen, on consecutive ports. Their control routes are
    unauthenticated."""
    request_timeout_seconds: Seconds = 600.0
    """A server is lost if it has requests and generates no token for this long, or takes longer to
    load weights."""
    max_in_flight: Positive = 256
    """Maximum outstanding requests per server."""
    weight_transfer: str = "folder"
    """`folder`: safetensors in this machine's shared memory; `/path`: in a folder that trainer and
    servers share."""

    @field_validator("weight_transfer")
    @classmethod
    def _is_folder_or_path(cls, transfer: str) -> str:
        if transfer != "folder" and not transfer.startswith(("/", "~")):
            raise ValueError("use folder, or the absolute path of a shared folder")
        return transfer

    @field_validator("address")
    @classmethod
    def _is_an_address(cls, address: str) -> str:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or not 1 <= int(port) <= 65535:
            raise ValueError("expected host:port with a port of 1 to 65535")
        if ":" in host and not (host.startswith("[") and host.endswith("]")):
            raise ValueError("expected an IPv6 address in brackets, such as [::1]:8300")
        return address

    @property
    def sync_folder(self) -> str | None:
        """The shared folder for weights; None if the recipe names none."""
        return None if self.weight_transfer == "folder" else self.weight_transfer

    @property
    def host(self) -> str:
        """The host of `address`, without the brackets of IPv6."""
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def base_port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @field_validator("urls")
    @classmethod
    def _are_urls(cls, urls: list[str]) -> list[str]:
        """Returns the URLs without trailing slashes. Refuses what is not the plain address of a
        server, and repeated ones."""
        for url in urls:
            if "@" in url:
                raise ValueError(
                    "no user name and password in a URL: it would be written to disk; for servers "
                    "with a key set VLLM_API_KEY in the environment"
                )
            if "?" in url or "#" in url:
                raise ValueError(f"{url!r}: the address of a server ends before ? and #")
            if not _is_url(url):
                raise ValueError(f"{url!r} is not a URL such as http://10.0.0.5:8000")
        return distinct([url.rstrip("/") for url in urls])


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        parts.port  # noqa: B018 - raises ValueError for what is no port
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)


class CollectionSection(Section):
    max_ahead_steps: Annotated[int, Field(ge=0)] = 1
    """Steps of prompts that may be sampled ahead of the trainer; 0: only when the step before is
    done. Not for `buffer_only`."""
    order: Literal["oldest_first", "newest_first"] = "oldest_first"
    """Which finished groups a step takes first. `newest_first` (paper B's queue) needs
    `replay.preset: grpo`."""
    partial_rollouts: Literal["keep", "drop"] = "keep"
    """Train on rollouts during which the weights changed (partial rollouts), with the log-probs of
    the versions that sampled them, or drop them."""
    replay_journal: str | None = None
    """Asynchronous run whose journal is repeated instead of sampling; the same recipe gives the
    same weights."""


class SamplingSection(Section):
    backend: one_of(SAMPLERS) = "hf"  # type: ignore[valid-type]
    """`hf`: transformers; `vllm`: vLLM in every rank; `vllm_server`: vLLM over HTTP; or your own
    class (docs/api.md)."""
    prompts_per_step: Positive = 32
    """Prompts per training step, over all ranks."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """Completions per prompt, G."""
    max_refills: Annotated[int, Field(ge=0)] = 0
    """Dynamic sampling (DAPO): while groups are dropped, sample as many further prompts, at most
    this many times a step."""
    temperature: Annotated[float, Field(ge=MIN_TEMPERATURE)] = 1.0
    """Applied to both log-probs of the ratio too. Training uses neither top-p nor top-k."""
    max_completion_length: Positive = 8192
    """Maximum tokens of a completion."""
    stop_tokens: Annotated[list[str], Field(min_length=1)] | None = None
    """Tokens that end a completion, as text, in training and evaluation: `[<|endoftext|>]`, or
    `["\\n"]` where a newline is one token. Null: docs/sampling.md."""
    max_batch_rollouts: Positive = 1024
    """Completions that `hf` decodes at once. Fewer need less memory."""
    logprob_gap_limit: Annotated[float, Field(gt=0.0)] | None = None
    """The run stops if the mean |sampler - trainer| log-prob is larger after a weight sync, in
    nats. If null, 0.01 when both compute in fp32, else 0.1."""
    lora: Literal["adapter", "merged"] = "adapter"
    """With `model.lora`, what a weight sync brings the sampler. `adapter`: the adapters, exactly,
    beside a base of its own. `merged`: all weights with the adapters merged in, rounded to
    `model.dtype`; a sampler of your own gets these in any case."""
    vllm: VllmSection = Field(default_factory=VllmSection)
    """vLLM's engine arguments, in process and for servers launched by the run."""
    servers: ServersSection = Field(default_factory=ServersSection)
    """Settings of the `vllm_server` backend."""
    collection: CollectionSection = Field(default_factory=CollectionSection)
    """Settings of `run.mode: async`."""

    @property
    def gpus_per_server(self) -> int:
        """GPUs of one vLLM server. A server given by URL counts as 1: its number is unknown."""
        return 1 if self.servers.urls else self.vllm.tensor_parallel_size

    @property
    def rollouts_per_step(self) -> int:
        """Rollouts that a step samples without refills: prompts times G."""
        return self.prompts_per_step * self.group_size

    @property
    def fp32_head(self) -> bool:
        """True if `vllm` asks for logits in fp32: trainer and samplers compute alike."""
        return self.vllm.head_dtype == "float32"

    @property
    def facts(self) -> SamplerFacts:
        return SamplerFacts.of(self.backend)

    def takes_adapters(self, model: ModelSection) -> bool:
        """Returns whether weight updates contain only the LoRA adapters of `model`."""
        return model.lora.r is not None and self.lora == "adapter" and self.facts.takes_adapters

    @property
    def servers_used(self) -> int:
        """Number of vLLM servers that a run samples with; 0 without, or if it replays a journal."""
        if not self.facts.on_servers or self.collection.replay_journal is not None:
            return 0
        return self.servers.launch or len(self.servers.urls)

    @property
    def servers_launched(self) -> int:
        """Number of vLLM servers that a run starts on its machine."""
        return 0 if self.servers.urls else self.servers_used
