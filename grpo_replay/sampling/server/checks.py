"""Validates that a server matches the recipe, before it gets weights."""

import json
import re
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any

from transformers import PretrainedConfig

from grpo_replay.errors import SamplerError
from grpo_replay.sampling.server.routes import (
    CONTROL_SECONDS,
    TOKEN_COUNTER,
    Refused,
    VllmServer,
    block_on,
)

MIN_VLLM = (0, 32)
"""The first version that reports which weights sampled which token."""

START_COMMAND = (
    "start it with: VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server "
    "--model MODEL --dtype {dtype} --max-model-len {length} --logprobs-mode processed_logprobs "
    "--generation-config vllm --skip-tokenizer-init --enable-scale-out{lora} (on a CPU also "
    "--no-enable-chunked-prefill, and VLLM_CPU_KVCACHE_SPACE=1 before it)"
)

LORA_OPTIONS = (
    " --enable-lora --max-lora-rank {max_lora_rank} --max-loras {max_loras} --max-cpu-loras "
    "{max_cpu_loras}, with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 before it"
)


def check_server(
    server: VllmServer, config: PretrainedConfig, arguments: Mapping[str, Any]
) -> None:
    """Raises Unreachable, or SamplerError that lists every mismatch between the server and one that
    the run would launch: with these EngineArgs (`arguments`), for a model of this `config`."""
    try:
        block_on(server.check_health(CONTROL_SECONDS))
        problems = [
            *_version_problems(server),
            *_model_problems(server, config, arguments["max_model_len"]),
            *_setting_problems(server, arguments),
            *_adapter_problems(server, arguments),
        ]
    except (Refused, KeyError, IndexError, TypeError, ValueError) as error:
        problems = [f"it does not answer like vLLM 0.32 in development mode ({error!r})"]
    if problems:
        lora = LORA_OPTIONS.format_map(arguments) if "enable_lora" in arguments else ""
        length = arguments["max_model_len"]
        how = START_COMMAND.format(dtype=arguments["dtype"], length=length, lora=lora)
        raise SamplerError(
            f"the vLLM server {server.url} does not match this run: {'; '.join(problems)}; {how}"
        )


def _version_problems(server: VllmServer) -> Iterator[str]:
    """Yield a problem if vLLM is too old. A build from source has no number, and is accepted."""
    version = server.get("/version")["version"]
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and (int(numbers[1]), int(numbers[2])) < MIN_VLLM:
        yield (
            f"it runs vLLM {version}, which does not say which weights sampled a token: use 0.32 "
            "or newer"
        )


def _model_problems(server: VllmServer, config: PretrainedConfig, longest: int) -> Iterator[str]:
    """Yields a problem if the server's longest sequence is too short, and for every size of its
    model that differs from the configuration."""
    model = server.get("/v1/models")["data"][0]
    if model["max_model_len"] < longest:
        yield f"its longest sequence is {model['max_model_len']}, not {longest}"
    answer = server.post("/collective_rpc", {"method": "get_model_inspection"})
    outline = json.loads(answer)["results"][0]
    facts = read_outline(outline)
    for name, expected in (
        ("vocabulary", config.vocab_size),
        ("hidden size", config.hidden_size),
        ("number of layers", config.num_hidden_layers),
    ):
        if facts.get(name) != expected:
            yield f"its model ({model['root']}) has {name} {facts.get(name)}, not {expected}"


def read_outline(outline: str) -> dict[str, int]:
    """Read vocabulary, hidden size and number of layers, as far as present, from vLLM's outline.

    A tree of 28 layers contains `(embed_tokens): VocabParallelEmbedding(… embedding_dim=1024,
    org_vocab_size=151936 …)` and, one level below `(layers): ModuleList()(`, `(0-27): 28 x …`.
    """
    facts = {}
    wrapped = r"(?:\)\(\s*\(base_layer\): \w+\()?"  # with LoRA
    embedding = re.search(rf"\(embed_tokens\): \w+\({wrapped}([^)]*)\)", outline)
    if embedding:
        for name, key in (("vocabulary", "org_vocab_size"), ("hidden size", "embedding_dim")):
            if number := re.search(rf"\b{key}=(\d+)", embedding[1]):
                facts[name] = int(number[1])
    stack = re.search(r"^( *)\(layers\): ModuleList\(\)\(\n((?:\1  .*\n)+)", outline, re.MULTILINE)
    if stack:
        entry = re.compile(rf"^{stack[1]}  \(\d+(?:-\d+)?\): (?:(\d+) x )?", re.MULTILINE)
        facts["number of layers"] = sum(int(layer[1] or 1) for layer in entry.finditer(stack[2]))
    return facts


def _setting_problems(server: VllmServer, arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yields a problem for every setting that changes log-probs, counting or stability: log-prob
    mode, dtype, head precision, quantization, token counter, chunked prefill on a CPU."""
    settings = server.get("/server_info?config_format=json")["vllm_config"]
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


def _adapter_problems(server: VllmServer, arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yields problems of a run that pushes LoRA adapters: the server takes none, too few or too
    small ones, or none at run time (then the route that loads them answers 404)."""
    if "enable_lora" not in arguments:
        return
    settings = server.get("/server_info?config_format=json")["vllm_config"]
    lora = settings.get("lora_config")
    if lora is None:
        yield "it takes no LoRA adapters: --enable-lora is missing (or set sampling.lora merged)"
        return
    for name in ("max_lora_rank", "max_loras", "max_cpu_loras"):
        if lora[name] < arguments[name]:
            option = name.replace("_", "-")
            yield f"its --{option} is {lora[name]}, less than {arguments[name]}"
    try:
        server.load_adapter("", "", CONTROL_SECONDS)
    except Refused as error:
        if error.status == HTTPStatus.NOT_FOUND:
            yield "it loads no adapters at run time: VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 is missing"
