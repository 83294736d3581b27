"""A fake vLLM server that a whole asynchronous run can use: it also takes weights.

Its completions are random digits, a function of the request's seed. It samples nothing from the
weights it is given, but reads them from disk, and labels what it answers as a real one does.

    python fake_policy_server.py PORT [SECONDS_PER_COMPLETION]
"""

import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from fake_server import FakeServer

EOS, ZERO = 1, 5  # ids of the tiny tokenizer: <eos> and "0"
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
    it answers the next loads of weights."""

    def __init__(self, port: int = 0, seconds: float = 0.0) -> None:
        super().__init__("default", port)
        self.seconds = seconds
        self.calls: list[str] = []
        self.loaded: list[str] = []
        self.load_status = 200
        self.longest = 5
        self.device, self.splits_prompts = "cpu", False
        self.vllm_version = "0.32.0"
        self._resumed = threading.Event()
        self._resumed.set()

    def describe(self, path: str) -> Any:
        if path == "/version":
            return {"version": self.vllm_version}
        if path == "/v1/models":
            return {"data": [{"max_model_len": 10_000, "root": "fake"}]}
        if path.startswith("/server_info"):
            model = {
                "logprobs_mode": "processed_logprobs",
                "dtype": "float32",
                "quantization": None,
            }
            config = {
                "model_config": model,
                "scheduler_config": {"enable_chunked_prefill": self.splits_prompts},
                "device_config": {"device": self.device},
                "weight_transfer_config": None,
            }
            return {"vllm_config": config}
        return super().describe(path)

    def control(self, path: str, body: Any) -> tuple[int, Any]:
        name = path.partition("?")[0].strip("/")
        if name == "collective_rpc":
            name = body["method"]
        self.calls.append(name if name != "update_weight_version" else body["new_version"])
        if name == "get_model_inspection":
            return 200, {"results": [OUTLINE]}
        if name == "reload_weights":
            return self._load(body["kwargs"]["weights_path"])
        if name == "update_weight_version":
            self.label = body["new_version"]
        if name == "pause":
            self._resumed.clear()
        if name == "resume":
            self._resumed.set()
        return 200, {"success": True}

    def _load(self, folder: str) -> tuple[int, Any]:
        files = list(Path(folder).glob("*.safetensors"))
        status = self.load_status if files else 500
        if status == 200:
            self.loaded.append(Path(folder).name)
        return status, {"error": {"message": f"{len(files)} files in {folder}"}}

    def sample(self, body: dict[str, Any]) -> list[int]:
        self._resumed.wait(30)
        random = np.random.default_rng(body["sampling_params"]["seed"])
        digits = ZERO + random.integers(0, 10, random.integers(1, self.longest + 1))
        return [*map(int, digits), EOS]


if __name__ == "__main__":
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 0.02
    server = FakePolicyServer(int(sys.argv[1]), seconds)
    print(server.url, flush=True)
    while True:
        time.sleep(60)
