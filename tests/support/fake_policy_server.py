"""A fake vLLM server that a whole asynchronous run can use: it also takes weights.

Its completions are random digits, a function of the request's seed. It samples nothing from the
weights it is given, but reads them from disk, and labels what it answers as a real one does.

    python fake_policy_server.py PORT [SECONDS_PER_COMPLETION]
"""

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from fake_server import Answer, FakeServer

EOS, ZERO = 1, 5  # ids of the tiny tokenizer: <eos> and "0"
HOLD_SECONDS = 30.0
OUTLINE = """Qwen3ForCausalLM(
  (model): Qwen3Model(
    (embed_tokens): VocabParallelEmbedding(org_vocab_size=24, embedding_dim=64)
    (layers): ModuleList()(
      (0-2): 3 x Qwen3DecoderLayer()
    )
  )
)
"""


class FakePolicyServer(FakeServer):
    """`calls` are the control routes called, in order. `load_status` is the HTTP status with which
    it answers the next loads of weights. `settings` are those that it says it was started with.

    With `hold_after`, a completion stops after so many tokens until the weights have another label.
    What vLLM does then, it does too: a pause aborts the completion unless it says `mode=keep`, and
    further tokens are sampled from the keys of the old weights unless these were reset for running
    requests. A token's log-prob is that of the label of the weights and keys it is sampled from.
    """

    def __init__(self, port: int = 0, seconds: float = 0.0) -> None:
        super().__init__("default", port)
        self.seconds = seconds
        self.calls: list[str] = []
        self.loaded: list[str] = []
        self.adapters: set[str] = set()
        self.load_status = 200
        self.longest = 5
        self.hold_after: int | None = None
        self.holding = threading.Event()
        self.logprob_of: Callable[[str], float] = lambda label: self.logprob
        self.vllm_version = "0.32.0"
        self.outline = OUTLINE
        self.max_model_len = 10_000
        self.settings: dict[str, Any] = {
            "model_config": {
                "logprobs_mode": "processed_logprobs", "dtype": "float32", "quantization": None,
            },
            "scheduler_config": {"enable_chunked_prefill": False},
            "device_config": {"device": "cpu"},
        }  # fmt: skip
        self._aborts = 0  # pauses that aborted what was running
        self._keys_are_new = True
        self._resumed = threading.Event()
        self._resumed.set()

    def describe(self, path: str) -> Any:
        if path == "/version":
            return {"version": self.vllm_version}
        if path == "/v1/models":
            return {"data": [{"max_model_len": self.max_model_len, "root": "fake"}]}
        if path.startswith("/server_info"):
            return {"vllm_config": self.settings}
        return super().describe(path)

    def control(self, path: str, body: Any) -> tuple[int, Any]:
        route, _, query = path.partition("?")
        name = route.strip("/")
        if name == "collective_rpc":
            name = body["method"]
        self.calls.append(name if name != "update_weight_version" else body["new_version"])
        if name == "get_model_inspection":
            return 200, {"results": [self.outline]}
        if name == "reload_weights":
            self._keys_are_new = False
            return self._load(body["kwargs"]["weights_path"])
        if name == "v1/load_lora_adapter":
            if self.settings.get("lora_config") is None:
                return 404, {"detail": "Not Found"}
            status, answer = self._load(body["lora_path"] or "nowhere")
            self.adapters |= {body["lora_name"]} if status == 200 else set()
            return status, answer
        if name == "reset_prefix_cache":
            self._keys_are_new = "reset_running_requests=true" in query
        if name == "update_weight_version":
            self.label = body["new_version"]
        if name == "pause":
            self._resumed.clear()
            self._aborts += "mode=keep" not in query
        if name == "resume":
            self._resumed.set()
        return 200, {"success": True}

    def _complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        named = body.get("model")
        if named is not None and named not in self.adapters:
            return 404, {"error": {"message": f"The model `{named}` does not exist."}}
        return super()._complete(body)

    def _load(self, folder: str) -> tuple[int, Any]:
        files = list(Path(folder).glob("*.safetensors"))
        status = self.load_status if files else 500
        if status == 200:
            self.loaded.append(Path(folder).name)
        return status, {"error": {"message": f"{len(files)} files in {folder}"}}

    def sample(self, body: dict[str, Any]) -> Answer:
        aborts = self._aborts
        self._resumed.wait(HOLD_SECONDS)
        first = second = self.label
        random = np.random.default_rng(body["sampling_params"]["seed"])
        digits = ZERO + random.integers(0, 10, random.integers(1, self.longest + 1))
        tokens = [*map(int, digits), EOS]
        held = len(tokens) if self.hold_after is None else self.hold_after
        if held < len(tokens):
            self._hold(first, aborts)
            if self._aborts > aborts:
                labels = [first] * held
                return Answer(tokens[:held], [self.logprob] * held, labels, "abort")
            second = self.label
        keys = second if self._keys_are_new else first
        rest = len(tokens) - held
        logprobs = [self.logprob_of(first)] * held + [self.logprob_of(keys)] * rest
        return Answer(tokens, logprobs, [first] * held + [second] * rest)

    def _hold(self, label: str, aborts: int) -> None:
        self.holding.set()
        deadline = time.monotonic() + HOLD_SECONDS
        while self._aborts == aborts and not (self._resumed.is_set() and self.label != label):
            assert time.monotonic() < deadline, "no update came"
            time.sleep(0.002)


if __name__ == "__main__":
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 0.02
    server = FakePolicyServer(int(sys.argv[1]), seconds)
    print(server.url, flush=True)
    while True:
        time.sleep(60)
