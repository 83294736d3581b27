"""NCCL weight transfer without NCCL: vLLM's own trainer and worker engines, over real HTTP and a
real rendezvous, with gloo in place of the communicator and streams on which nothing is pending."""

import contextlib
import datetime
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

LONGEST_WAIT_SECONDS = 8


class GlooCommunicator:
    """Stands for vLLM's PyNcclCommunicator. Like NCCL a broadcast waits for every peer until the
    communicator is destroyed, by whichever thread."""

    alive: ClassVar[list["GlooCommunicator"]] = []

    def __init__(self, group: Any, device: Any) -> None:
        self.rank, self.world_size = group.rank, group.world_size
        store = dist.PrefixStore("gloo", group.store)
        # Destroying gloo's group waits for what is pending until the time is up.
        timeout = datetime.timedelta(seconds=LONGEST_WAIT_SECONDS)
        self._gloo = dist.ProcessGroupGloo(store, group.rank, group.world_size, timeout)
        self.alive.append(self)

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = src
        self._wait(self._gloo.broadcast([tensor], options))
        self._wait(self._gloo.barrier())  # gloo's root would not wait for its peers

    def _wait(self, work: Any) -> None:
        while not (work.is_completed() and work.is_success()):
            if self not in self.alive:
                raise RuntimeError("the communicator was aborted")
            time.sleep(0.002)

    def destroy(self) -> None:
        if self in self.alive:
            self.alive.remove(self)


class Finished:
    """A CUDA stream on which nothing is ever pending."""

    def synchronize(self) -> None: ...


@contextlib.contextmanager
def gloo_for_nccl() -> Iterator[list[GlooCommunicator]]:
    """The living communicators of this process."""
    from vllm.distributed.device_communicators import pynccl
    from vllm.distributed.weight_transfer import packed_tensor

    from grpo_replay.sampling.server import weight_nccl

    GlooCommunicator.alive = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pynccl, "PyNcclCommunicator", GlooCommunicator)
        patch.setattr(packed_tensor, "_get_streams", lambda _, count: (Finished(),) * count)
        patch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
        patch.setattr(torch.accelerator, "current_device_index", lambda: 0)
        patch.setattr(weight_nccl, "DEVICE", "cpu")
        yield GlooCommunicator.alive


class TransferServer:
    """The routes of a vLLM server that weight transfer uses; `call(method, *arguments)` is its
    worker. `refuse` names routes that answer with HTTP 500."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.refuse: set[str] = set()
        self.asked: list[str] = []
        lock = threading.Lock()
        arguments = {"init_weight_transfer_engine": "init_info", "update_weights": "update_info"}
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                assert self.path == "/get_world_size"
                self._answer(200, {"world_size": 1})

            def do_POST(self) -> None:
                text = self.rfile.read(int(self.headers["Content-Length"] or 0))
                method = self.path.removeprefix("/").partition("?")[0]
                server.asked.append(method)
                if method in server.refuse:
                    self._answer(500, {"error": {"message": "as told"}})
                    return
                if method != "pause":
                    name = arguments.get(method)
                    with lock:
                        call(method, *([json.loads(text)[name]] if name else []))
                self._answer(200, {})

            def _answer(self, status: int, value: Any) -> None:
                payload = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            def log_message(self, *_: Any) -> None: ...

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()


def receiving_worker(vllm_config: Any) -> tuple[Callable[..., Any], dict[str, torch.Tensor]]:
    """vLLM's worker side of the transfer in front of no model: what arrives is kept."""
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    received: dict[str, torch.Tensor] = {}

    class Keeper(torch.nn.Module):
        def load_weights(self, weights: Any) -> None:
            received.update({name: tensor.clone() for name, tensor in weights})

    class Receiver(NCCLWeightTransferEngine):
        def start_weight_update(self) -> None:
            received.clear()

        def finish_weight_update(self) -> None: ...

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.receive_weights(self.parse_update_info(update_info))

    engine = Receiver(
        WeightTransferConfig(backend="nccl"), vllm_config, torch.device("cpu"), Keeper()
    )

    def call(method: str, *arguments: Any) -> None:
        if method == "init_weight_transfer_engine":
            engine.init_transfer_engine(engine.parse_init_info(*arguments))
        elif method == "shutdown_weight_transfer_engine":
            engine.shutdown()
        else:
            getattr(engine, method)(*arguments)

    return call, received
