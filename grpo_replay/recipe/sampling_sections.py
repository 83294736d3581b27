"""How completions are sampled: the backend, in-process vLLM, and vLLM servers."""

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from grpo_replay.recipe.base import Positive, Section

LEAST_VLLM_TEMPERATURE = 0.01
"""vLLM raises smaller positive temperatures to this one, and logs it."""


class VllmSection(Section):
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=1.0)] = 0.6
    """Share of GPU memory that vLLM may use (TRL: vllm_gpu_memory_utilization). Ignored on CPU."""
    tensor_parallel_size: Positive = 1
    """GPUs per vLLM engine. Must divide the number of ranks on a node."""
    max_model_len: Positive | None = None
    """Maximum length of prompt plus completion in tokens. Derived from the prompt and completion
    limits if null."""
    enforce_eager: bool = False
    """Run eagerly instead of capturing CUDA graphs."""
    async_scheduling: bool | None = None
    """Schedule the next token while the GPU computes the current one. If null, vLLM decides: on
    with a GPU, always off on CPU."""
    enable_prefix_caching: bool = True
    """Share the prompt's KV cache within a group. The cache is reset at every weight sync."""
    sleep_mode: bool = True
    """Free the sampler's GPU memory during training. Ignored on CPU."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the sampler. `auto` is the precision of the policy."""


class ServersSection(Section):
    urls: list[str] = Field(default_factory=list)
    """URLs of running vLLM servers, for example `http://10.0.0.5:8000`."""
    launch: Annotated[int, Field(ge=0)] = 0
    """Number of servers to start on this machine. They stop with the run."""
    host: str = "127.0.0.1"
    """Address that launched servers bind to. Their control routes are unauthenticated."""
    base_port: Annotated[int, Field(ge=1, le=65535)] = 8300
    """Port of the first launched server. Each further server takes the next port."""
    start_timeout_seconds: Annotated[float, Field(gt=0)] = 600.0
    """Maximum time for a server to become healthy."""
    request_timeout_seconds: Annotated[float, Field(gt=0)] = 600.0
    """A server is lost if it has outstanding requests and generates no token for this long, or
    takes longer than this to load new weights. The time of a whole completion is not limited."""
    max_retries: Annotated[int, Field(ge=0)] = 2
    """Number of times a failed request is sent again, to another server if there is one."""
    max_in_flight: Positive = 256
    """Maximum number of outstanding requests per server."""
    on_failure: Literal["stop", "drop"] = "stop"
    """What happens when a server is lost: `stop` ends the run, `drop` continues with the other
    servers."""
    weight_transfer: Literal["folder", "nccl"] = "folder"
    """How weights reach the servers: through a safetensors folder that trainer and servers share,
    or over NCCL."""
    sync_folder: str | None = None
    """Shared folder for the weights. A folder in shared memory on this machine if null."""

    @field_validator("urls")
    @classmethod
    def _are_urls(cls, urls: list[str]) -> list[str]:
        for url in urls:
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
    backend: Literal["hf", "vllm", "vllm_server"] = "hf"
    """`hf`: transformers; `vllm`: vLLM in the process of every rank; `vllm_server`: vLLM over
    HTTP."""
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
    sync_bucket_mib: Positive = 512
    """Size of the weights gathered at once during a weight sync."""
    vllm: VllmSection = Field(default_factory=VllmSection)
    """Settings of in-process vLLM, and of servers launched by the run."""
    servers: ServersSection = Field(default_factory=ServersSection)
    """Settings of the `vllm_server` backend."""
    collection: CollectionSection = Field(default_factory=CollectionSection)
    """Settings of `run.mode: async`."""

    @property
    def gpus_per_server(self) -> int:
        """GPUs of one vLLM server. One that runs elsewhere counts as one: its number is unknown."""
        return 1 if self.servers.urls else self.vllm.tensor_parallel_size
