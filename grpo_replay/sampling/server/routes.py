"""Client of one vLLM server: the routes of vLLM 0.32 that a run uses.

Completions come from /inference/v1/generate (token ids in; token ids, log-probs and the weight
version of every token out). Weights are updated through the routes of VLLM_SERVER_DEV_MODE=1.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_replay.sampling.server.http_client import HttpClient
from grpo_replay.sampling.vllm_requests import (
    build_completion,
    read_spans,
    sampling_parameters,
)
from grpo_replay.types import Completion, GenerationRequest

CONTROL_SECONDS = 30.0
"""Time limit of a route that answers at once."""

TOKEN_COUNTER = "vllm:generation_tokens_total"


class VllmServer:
    """Methods raise http_client's Unreachable or Refused; `complete` also SamplerError.

    The coroutines are those that the request pool calls; they run in the background loop.
    """

    def __init__(self, url: str, run: str, log: Path | None = None) -> None:
        """`run` identifies this run in weight labels, so that version 3 of another run is told
        apart. `log` is the log file of a launched server."""
        self.url = url.rstrip("/")
        self.http = HttpClient(self.url)
        self.log = log
        self.prefix = f"{run}/"

    def label(self, policy_version: int) -> str:
        """The server's label for the weights of a policy version of this run."""
        return f"{self.prefix}{policy_version}"

    async def check_health(self, timeout_seconds: float) -> None:
        """Returns if the server is healthy."""
        await self.http.request("GET", "/health", None, timeout_seconds)

    async def generated_tokens(self, timeout_seconds: float) -> float | None:
        """Tokens generated since the server started, for all clients (a Prometheus counter); None
        if it does not count them (`--disable-log-stats`)."""
        text = await self.http.request_text("GET", "/metrics", None, timeout_seconds)
        lines = text.splitlines()
        counts = [line.rsplit(" ", 1)[1] for line in lines if line.startswith(TOKEN_COUNTER)]
        return sum(map(float, counts)) if counts else None

    def models(self) -> list[dict[str, Any]]:
        """The models it serves. `complete` samples from the first."""
        return self.http.get("/v1/models", CONTROL_SECONDS)["data"]

    def settings(self) -> dict[str, Any]:
        """The vLLM configuration that the server was started with."""
        answer = self.http.get("/server_info?config_format=json", CONTROL_SECONDS)
        return answer["vllm_config"]

    def model_outline(self) -> str:
        """The module tree of the model, as the first worker prints it."""
        body = {"method": "get_model_inspection"}
        return self.http.post("/collective_rpc", body, CONTROL_SECONDS)["results"][0]

    def world_size(self) -> int:
        """Number of workers: tensor, pipeline and data parallel."""
        return self.http.get("/get_world_size", CONTROL_SECONDS)["world_size"]

    async def generate(
        self, request: GenerationRequest, stop_token_ids: Sequence[int]
    ) -> dict[str, Any]:
        """vLLM's answer to one request, without a time limit. Cancelling closes the connection, and
        vLLM then aborts the request."""
        body = {
            "token_ids": request.prompt_token_ids.tolist(),
            "sampling_params": sampling_parameters(request, stop_token_ids),
        }
        path = "/inference/v1/generate"
        answer = await self.http.request("POST", path, body, None, repeatable=True)
        return answer["choices"][0]

    async def complete(
        self, request: GenerationRequest, stop_token_ids: Sequence[int]
    ) -> Completion:
        """The validated completion of one request, as `generate` gets it."""
        sampled = await self.generate(request, stop_token_ids)
        place = f"completion {tuple(request.key)} from {self.url}"
        spans = sampled["weight_versions"] or []
        return build_completion(
            request,
            sampled["token_ids"],
            [entry["logprob"] for entry in sampled["logprobs"]["content"]],
            sampled["finish_reason"],
            read_spans([span["version"] for span in spans], place, self.prefix),
            stop_token_ids,
        )

    def version_of(self, label: Any) -> int | None:
        """The policy version that `label` names; None if it is not a label of this run."""
        if not isinstance(label, str) or not label.startswith(self.prefix):
            return None
        version = label.removeprefix(self.prefix)
        return int(version) if version.isdecimal() else None

    async def weight_label(self, timeout_seconds: float = CONTROL_SECONDS) -> str:
        """The label of its current weights; "default" if none was set."""
        answer = await self.http.request("GET", "/weight_info", None, timeout_seconds)
        return answer["weight_version"]

    def set_weight_label(self, label: str) -> None:
        body = {"new_version": label}
        self.http.post("/update_weight_version", body, CONTROL_SECONDS)

    def pause(self, timeout_seconds: float) -> None:
        """Freeze running requests in place."""
        self.http.post("/pause?mode=keep", None, timeout_seconds)

    def resume(self) -> None:
        self.http.post("/resume", None, CONTROL_SECONDS)

    def reload_weights(self, folder: str, timeout_seconds: float) -> None:
        """Replace all weights by the safetensors files in `folder`, a path on the server."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        self.http.post("/collective_rpc", body, timeout_seconds)

    def drop_cached_prompts(self) -> bool:
        """Empty the prefix cache; frozen requests recompute their keys. True on success."""
        path = "/reset_prefix_cache?reset_running_requests=true"
        return self.http.post(path, None, CONTROL_SECONDS)["success"]
