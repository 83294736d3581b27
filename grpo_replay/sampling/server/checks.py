"""Validate that a server matches the recipe, once, before sampling."""

import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PretrainedConfig

from grpo_replay.errors import SamplerError
from grpo_replay.sampling.server.routes import (
    CONTROL_SECONDS,
    TOKEN_COUNTER,
    Refused,
    Unreachable,
    VllmServer,
    block_on,
)

logger = logging.getLogger(__name__)

OLDEST_VLLM = (0, 27)
"""The first with /weight_info and /update_weight_version."""
OLDEST_WITH_TOKEN_LABELS = (0, 32)
"""The first whose completions say which weights sampled which token."""

HOW_TO_START = (
    "start it with: VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server "
    "--model MODEL --dtype {dtype} --max-model-len {length} --logprobs-mode processed_logprobs "
    "--generation-config vllm --skip-tokenizer-init --enable-scale-out (not before vLLM 0.30; on a "
    "CPU also --no-enable-chunked-prefill, and VLLM_CPU_KVCACHE_SPACE=1 before it)"
)


def check_server(
    server: VllmServer,
    config: PretrainedConfig,
    arguments: Mapping[str, Any],
    nccl: bool,
    pushed_while_sampling: bool,
) -> None:
    """Raises SamplerError that lists every mismatch between the server and one that the run would
    launch with these EngineArgs for a model of this configuration. `nccl`: weights come over NCCL.
    """
    how = HOW_TO_START.format(dtype=arguments["dtype"], length=arguments["max_model_len"])
    try:
        block_on(server.check_health(CONTROL_SECONDS))
        problems = [
            *_version_problems(server, pushed_while_sampling),
            *_model_problems(server, config, arguments["max_model_len"]),
            *_setting_problems(server, arguments, nccl),
        ]
    except Unreachable as error:
        raise SamplerError(
            f"the vLLM server {server.url} cannot be reached ({error}); check "
            "sampling.servers.urls and that it is running"
        ) from error
    except Refused as error:
        raise SamplerError(
            f"the server {server.url} refused a request that vLLM 0.27 to 0.33 in development "
            f"mode answer ({error}); {how}"
        ) from error
    except (KeyError, IndexError, TypeError) as error:
        raise SamplerError(
            f"the server {server.url} answers, but not like vLLM 0.32 ({error!r}); {how}"
        ) from error
    if problems:
        raise SamplerError(
            f"the vLLM server {server.url} does not match this run: {'; '.join(problems)}; {how}"
        )


def _version_problems(server: VllmServer, pushed_while_sampling: bool) -> Iterator[str]:
    """Of a server whose version has no numbers (a build from source), none."""
    version = server.vllm_version()
    numbers = re.match(r"(\d+)\.(\d+)", version)
    release = (int(numbers[1]), int(numbers[2])) if numbers else OLDEST_WITH_TOKEN_LABELS
    if release < OLDEST_VLLM:
        yield f"it runs vLLM {version}, which does not keep a label of its weights: use 0.32"
    elif release < OLDEST_WITH_TOKEN_LABELS and pushed_while_sampling:
        yield (
            f"it runs vLLM {version}, which does not say which weights sampled a token, as "
            "run.mode async needs: use 0.32"
        )
    elif release < OLDEST_WITH_TOKEN_LABELS:
        logger.warning(
            "%s runs vLLM %s, whose tokens have no label of their weights: its label is asked for "
            "after every completion",
            server.url,
            version,
        )


def _model_problems(server: VllmServer, config: PretrainedConfig, longest: int) -> Iterator[str]:
    model = server.models()[0]
    if model["max_model_len"] < longest:
        yield f"its longest sequence is {model['max_model_len']}, not {longest}"
    found = read_outline(server.model_outline())
    for name, expected in (
        ("vocabulary", config.vocab_size),
        ("hidden size", config.hidden_size),
        ("number of layers", config.num_hidden_layers),
    ):
        if found.get(name) != expected:
            yield f"its model ({model['root']}) has {name} {found.get(name)}, not {expected}"


def read_outline(outline: str) -> dict[str, int]:
    """Vocabulary, hidden size and number of layers in vLLM's outline of a model; missing facts are
    left out.

    A tree of 28 layers contains `(embed_tokens): VocabParallelEmbedding(… embedding_dim=1024,
    org_vocab_size=151936 …)` and, one level below `(layers): ModuleList()(`, `(0-27): 28 x …`.
    """
    facts = {}
    embedding = re.search(r"\(embed_tokens\): \w+\(([^)]*)\)", outline)
    if embedding:
        for name, key in (("vocabulary", "org_vocab_size"), ("hidden size", "embedding_dim")):
            if number := re.search(rf"\b{key}=(\d+)", embedding[1]):
                facts[name] = int(number[1])
    stack = re.search(r"^( *)\(layers\): ModuleList\(\)\(\n((?:\1  .*\n)+)", outline, re.MULTILINE)
    if stack:
        entry = re.compile(rf"^{stack[1]}  \(\d+(?:-\d+)?\): (?:(\d+) x )?", re.MULTILINE)
        facts["number of layers"] = sum(int(each[1] or 1) for each in entry.finditer(stack[2]))
    return facts


def _setting_problems(
    server: VllmServer, arguments: Mapping[str, Any], nccl: bool
) -> Iterator[str]:
    settings = server.settings()
    model = settings["model_config"]
    if model["logprobs_mode"] != "processed_logprobs":
        yield (
            f"its log-probs are {model['logprobs_mode']}, not processed_logprobs (those of the "
            "distribution sampled from)"
        )
    dtype = model["dtype"].removeprefix("torch.")
    if dtype != arguments["dtype"]:
        yield f"its dtype is {dtype}, not {arguments['dtype']}"
    head = arguments.get("hf_overrides", {}).get("head_dtype")
    if head == "float32" and (model.get("hf_overrides") or {}).get("head_dtype") != head:
        yield (
            "its output head has another precision: this run needs "
            '--hf-overrides \'{"head_dtype": "float32"}\''
        )
    if block_on(server.generated_tokens(CONTROL_SECONDS)) is None:
        yield f"it does not count tokens ({TOKEN_COUNTER} in /metrics): --disable-log-stats is set"
    quantization = arguments.get("quantization")
    if model["quantization"] != quantization:
        yield f"its quantization is {model['quantization']}, not {quantization}"
    on_cpu = settings["device_config"]["device"] == "cpu"
    if on_cpu and settings["scheduler_config"]["enable_chunked_prefill"]:
        yield "it splits prompts, and vLLM 0.32 then dies on a CPU: --no-enable-chunked-prefill"
    transfer = (settings["weight_transfer_config"] or {}).get("backend")
    if nccl and transfer != "nccl":
        yield (
            'it was started without --weight-transfer-config \'{"backend": "nccl"}\', which '
            "sampling.servers.weight_transfer nccl needs"
        )
