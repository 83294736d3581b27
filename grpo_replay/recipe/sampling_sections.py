"""How completions are sampled: the backend, in-process vLLM, and vLLM servers."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from grpo_replay.recipe.base import GIVEN, Passthrough, Positive, Section, one_of
from grpo_replay.recipe.open_lists import SAMPLERS

LEAST_VLLM_TEMPERATURE = 0.01
"""vLLM raises smaller positive temperatures to this one, and logs it."""


class VllmSection(Passthrough):
    """Engine arguments of vLLM by its own names, in process and for servers launched by the run.
    `gpu_memory_utilization` (0.6) is ignored on CPU; `tensor_parallel_size` (1) must divide the
    ranks on a node; `max_model_len` (null) is derived from the prompt and completion limits;
    `dtype` auto is that of the policy; `enable_prefix_caching` (true): the cache is reset at every
    weight sync; `async_scheduling` (null): vLLM decides; `enforce_eager` (false);
    `enable_sleep_mode` (true) frees the sampler's GPU memory during training. With
    `hf_overrides: {head_dtype: float32}` the output head's logits are fp32 for a model in bfloat16,
    in vLLM, in the `hf` sampler and in the trainer: their log-probs then differ less."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "gpu_memory_utilization": 0.6,
        "tensor_parallel_size": 1,
        "max_model_len": None,
        "enforce_eager": False,
        "async_scheduling": None,
        "enable_prefix_caching": True,
        "enable_sleep_mode": True,
        "dtype": "auto",
    }
    TAKEN: ClassVar[frozenset[str]] = frozenset(
        (
            *("model", "revision", "trust_remote_code", "logprobs_mode", "skip_tokenizer_init"),
            *("generation_config", "seed", "tokenizer"),
        )
    )

    if TYPE_CHECKING:
        gpu_memory_utilization: float = GIVEN
        tensor_parallel_size: int = GIVEN
        max_model_len: int | None = GIVEN
        enforce_eager: bool = GIVEN
        async_scheduling: bool | None = GIVEN
        enable_prefix_caching: bool = GIVEN
        enable_sleep_mode: bool = GIVEN
        dtype: str = GIVEN

    @model_validator(mode="after")
    def _is_possible(self) -> "VllmSection":
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization {self.gpu_memory_utilization}: above 0 to 1")
        if self.tensor_parallel_size < 1 or (self.max_model_len or 1) < 1:
            raise ValueError("tensor_parallel_size and max_model_len are integers of 1 or more")
        overrides = self.others.get("hf_overrides", {})
        if not isinstance(overrides, dict) or self.head_dtype not in (None, "model", "float32"):
            raise ValueError("hf_overrides is a mapping, its head_dtype float32 or model")
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise ValueError(f"dtype {self.dtype!r}: auto, float32 or bfloat16")
        return self

    @property
    def head_dtype(self) -> str | None:
        """Precision of the output head by vLLM's name; None if nothing is said."""
        return self.others.get("hf_overrides", {}).get("head_dtype")


class ServersSection(Section):
    urls: list[str] = Field(default_factory=list)
    """URLs of running vLLM servers, for example `http://10.0.0.5:8000`."""
    launch: Annotated[int, Field(ge=0)] = 0
    """Number of servers to start on this machine. They stop with the run."""
    address: str = "127.0.0.1:8300"
    """Where launched servers listen: the first at this port, each further one at the next. Their
    control routes are unauthenticated."""
    request_timeout_seconds: Annotated[float, Field(gt=0)] = 600.0
    """A server is lost if it has outstanding requests and generates no token for this long, takes
    longer than this to load new weights, or to become healthy after its start. The time of a whole
    completion is not limited."""
    max_in_flight: Positive = 256
    """Maximum number of outstanding requests per server."""
    on_failure: Literal["stop", "drop"] = "stop"
    """What happens when a server is lost: `stop` ends the run, `drop` continues with the other
    servers."""
    weight_transfer: str = "folder"
    """How weights reach the servers: `folder`, as safetensors in shared memory of this machine;
    `/path`, in a folder that trainer and servers share; `nccl`, over NCCL."""

    @field_validator("weight_transfer")
    @classmethod
    def _is_a_way(cls, way: str) -> str:
        if way not in ("folder", "nccl") and not way.startswith(("/", "~")):
            raise ValueError("use folder, nccl, or the absolute path of a shared folder")
        return way

    @field_validator("address")
    @classmethod
    def _is_an_address(cls, address: str) -> str:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or not 1 <= int(port) <= 65535:
            raise ValueError("expected host:port with a port of 1 to 65535")
        return address

    @property
    def over_nccl(self) -> bool:
        return self.weight_transfer == "nccl"

    @property
    def sync_folder(self) -> str | None:
        """The shared folder for the weights, if the recipe names one."""
        return None if self.weight_transfer in ("folder", "nccl") else self.weight_transfer

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0]

    @property
    def base_port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @field_validator("urls")
    @classmethod
    def _are_urls(cls, urls: list[str]) -> list[str]:
        for url in urls:
            if "@" in url:
                raise ValueError(
                    "no user name and password in a URL: it would be written to disk; for servers "
                    "with a key set VLLM_API_KEY in the environment"
                )
            if not _is_url(url):
                raise ValueError(f"{url!r} is not a URL such as http://10.0.0.5:8000")
        return urls


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        parts.port  # noqa: B018 - raises ValueError for what is no port
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)


class CollectionSection(Section):
    max_ahead_steps: Annotated[int, Field(ge=0)] = 1
    """Steps of prompts that may be sampled ahead of the trainer (AReaL: max_head_offpolicyness). 0
    samples a step's prompts only when the step before is done. Not used with `buffer_only`, which
    is never gated."""
    order: Literal["oldest_first", "newest_first"] = "oldest_first"
    """Which finished groups a step takes first. `newest_first` is paper B's queue without a buffer;
    it needs `replay.preset: grpo`."""
    straddlers: Literal["keep", "drop"] = "keep"
    """Rollouts during which the weights changed: train on them, with the log-probs of the versions
    that sampled their tokens, or drop them."""
    replay_journal: str | None = None
    """Run directory of an asynchronous run whose journal is replayed instead of sampling. The same
    recipe then gives the same weights."""


class SamplingSection(Section):
    backend: one_of(SAMPLERS) = "hf"  # type: ignore[valid-type]
    """`hf`: transformers; `vllm`: vLLM in the process of every rank; `vllm_server`: vLLM over
    HTTP; or a class of your own (docs/extend.md)."""
    prompts_per_step: Positive = 32
    """Prompts sampled per training step, over all ranks."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """Completions per prompt, G (TRL: num_generations)."""
    max_refills: Annotated[int, Field(ge=0)] = 0
    """Dynamic sampling (DAPO, arXiv 2503.14476): while a step has fewer than `prompts_per_step`
    groups that are not dropped, it samples as many further prompts as are missing, at most this
    many times. 0 trains on what one sampling leaves."""
    temperature: Annotated[float, Field(gt=0.0)] = 1.0
    """Sampling temperature, applied to both log-probs of the importance ratio. Training samples
    from the full distribution, without top-p or top-k."""
    max_completion_length: Positive = 8192
    """Maximum completion length in tokens (TRL: max_completion_length)."""
    stop_tokens: Annotated[list[str], Field(min_length=1)] | None = None
    """Tokens that end a completion, written as text, in training and evaluation: for example
    `[<|endoftext|>]`, or `["\\n"]` where a newline is one token. If null: the tokenizer's EOS, the
    EOS tokens of generation_config.json and config.json, and `<|endoftext|>` and `<|im_end|>` if
    the tokenizer has them."""
    max_batch_rollouts: Positive = 1024
    """Maximum number of completions that the `hf` backend decodes at once."""
    logprob_gap_limit: Annotated[float, Field(gt=0.0)] | None = None
    """Maximum tolerated mean |sampler - trainer| log-prob after a weight sync, in nats. A larger
    gap stops the run. If null, 0.01 when both sides compute in fp32 and 0.1 otherwise. Measured:
    1e-6 in fp32, 1e-2 in bf16, 0.2 with a stale output head."""
    vllm: VllmSection = Field(default_factory=VllmSection)
    """vLLM's engine arguments, in process and for servers launched by the run."""
    servers: ServersSection = Field(default_factory=ServersSection)
    """Settings of the `vllm_server` backend."""
    collection: CollectionSection = Field(default_factory=CollectionSection)
    """Settings of `run.mode: async`."""

    @property
    def gpus_per_server(self) -> int:
        """GPUs of one vLLM server. One that runs elsewhere counts as one: its number is unknown."""
        return 1 if self.servers.urls else self.vllm.tensor_parallel_size

    @property
    def rollouts_per_step(self) -> int:
        """Rollouts that one sampling of a step generates: prompts times G."""
        return self.prompts_per_step * self.group_size

    @property
    def vllm_in_ranks(self) -> bool:
        """True if every rank holds a vLLM engine, on its own device."""
        return self.backend == "vllm"

    @property
    def over_http(self) -> bool:
        """True if vLLM servers sample, on devices of their own."""
        return self.backend == "vllm_server"

    @property
    def longest_asked(self) -> int | None:
        """Tokens of prompt and completion that vLLM is to have room for; None to derive them."""
        return None if self.backend == "hf" else self.vllm.max_model_len

    @property
    def servers_used(self) -> int:
        """vLLM servers that a run samples with; 0 if it samples in its ranks, or repeats a
        journal."""
        if not self.over_http or self.collection.replay_journal is not None:
            return 0
        return self.servers.launch or len(self.servers.urls)

    @property
    def servers_launched(self) -> int:
        """vLLM servers that a run starts on its own machine."""
        return 0 if self.servers.urls else self.servers_used
