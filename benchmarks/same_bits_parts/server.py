"""Scripted vLLM servers: real HTTP, the routes and answers of vLLM 0.32 in development mode, and a
policy of their own on the CPU (torch and transformers alone) with the weights that they are given.

    python server.py SETTINGS_JSON      prints the URLs, one line, and serves until SIGTERM

No answer depends on timing. A token is a function of the prompt, the seed, the parameters and the
weights; each request is computed alone. With a script of an asynchronous run, completions at the
training temperature are held until the servers have the weights and the requests that belong to a
step; then its groups are answered one after the other, each when the verifiers have seen the one
before. A pause with mode keep finds a held request `seed % 4` tokens further: it straddles the
update. Every request is recorded, and written to the file `record` at the end.
"""

import asyncio
import hashlib
import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

ANY = None
PARAMETERS = {
    "max_tokens": ANY, "temperature": ANY, "top_p": ANY, "seed": ANY, "logprobs": ANY,
    "stop_token_ids": ANY, "ignore_eos": ANY, "detokenize": ANY, "skip_special_tokens": ANY,
    "output_kind": ANY, "n": (1,), "top_k": (0, -1), "min_p": (0,), "repetition_penalty": (1,),
    "presence_penalty": (0,), "frequency_penalty": (0,), "stop": (None, []), "min_tokens": (0,),
}  # fmt: skip
"""The parameters of a request, and the values allowed: what this policy cannot do is refused."""
POLLED = ("GET /health", "GET /metrics", "GET /weight_info", "GET /is_paused", "GET /load")
"""How often these come is a matter of time: the record has only whether they came."""

Answer = tuple[int, Any]
"""Status, and JSON, text or nothing."""


class Policy:
    """The model that one server samples from."""

    def __init__(self, folder: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def load(self, folder: str) -> str:
        """Take the weights in the folder, and return their digest. Raises ValueError for names that
        are not the model's, RuntimeError for shapes."""
        given: dict[str, torch.Tensor] = {}
        for path in sorted(Path(folder).glob("*.safetensors")):
            given |= load_file(path)
        own = self.model.state_dict().keys()
        tied = {"lm_head.weight"} if self.model.config.tie_word_embeddings else set()
        if own - given.keys() - tied or given.keys() - own:
            raise ValueError(f"other tensors: {sorted(own ^ given.keys())[:4]}")
        self.model.load_state_dict(given, strict=not tied)
        digest = hashlib.sha256()
        for name, tensor in sorted(given.items()):
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]

    @torch.inference_mode()
    def logprobs(self, ids: list[int], parameters: dict[str, Any]) -> torch.Tensor:
        """Of the next token: those of the distribution that is sampled from (vLLM's
        processed_logprobs), in float32."""
        logits = self.model(torch.tensor([ids])).logits[0, -1].float()
        logits = logits / (parameters["temperature"] or 1.0)
        ordered, places = logits.sort(descending=True)
        shares = ordered.softmax(-1)
        logits[places[shares.cumsum(-1) - shares >= parameters.get("top_p", 1.0)]] = -torch.inf
        return logits.log_softmax(-1)


class Sampled:
    """One request, and what of its completion there is. `arrived`: weight loads before it."""

    def __init__(self, body: dict[str, Any], arrived: int) -> None:
        self.prompt, self.parameters = body["token_ids"], body["sampling_params"]
        self.arrived = arrived
        self.tokens: list[int] = []
        self.logprobs: list[dict[str, Any]] = []
        self.spans: list[dict[str, Any]] = []
        self.finish: str | None = None
        self.answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._random = torch.Generator().manual_seed(self.parameters["seed"])

    @property
    def key(self) -> tuple[Any, ...]:
        return self.arrived, self.prompt, self.parameters["seed"]

    def advance(self, policy: Policy, label: str, tokens: int = 10**6) -> None:
        """Sample up to so many further tokens, with the weights of this label."""
        stops = list(self.parameters.get("stop_token_ids") or [])
        if not self.parameters.get("ignore_eos"):
            stops.append(policy.model.config.eos_token_id)
        for _ in range(tokens):
            if self.finish is not None:
                return
            logprobs = policy.logprobs([*self.prompt, *self.tokens], self.parameters)
            reached = logprobs.double().exp().cumsum(-1)
            point = torch.rand((), generator=self._random, dtype=torch.float64) * reached[-1]
            greedy = self.parameters["temperature"] == 0
            self._append(int(logprobs.argmax() if greedy else (reached < point).sum()), logprobs)
            if not self.spans or self.spans[-1]["version"] != label:
                self.spans.append({"version": label, "start": len(self.tokens) - 1})
            self.spans[-1]["end"] = len(self.tokens)
            if self.tokens[-1] in stops:
                self.finish = "stop"
            elif len(self.tokens) == self.parameters["max_tokens"]:
                self.finish = "length"

    def _append(self, token: int, logprobs: torch.Tensor) -> None:
        rank = int((logprobs > logprobs[token]).sum()) + 1
        entry = {"token_id": token, "logprob": float(logprobs[token]), "rank": rank}
        self.tokens.append(token)
        self.logprobs.append(entry | {"top_logprobs": [entry]})

    def end(self, finish: str | None = None) -> None:
        """Answer it, as it is."""
        self.finish = finish or self.finish
        if not self.answer.done():
            self.answer.set_result(None)

    def body(self) -> dict[str, Any]:
        """The answer, as vLLM gives it."""
        prompt, tokens = len(self.prompt), len(self.tokens)
        choice = {
            "index": 0, "finish_reason": self.finish, "token_ids": self.tokens,
            "stop_reason": self.tokens[-1] if self.finish == "stop" else None,
            "logprobs": {"content": self.logprobs}, "weight_versions": self.spans,
        }  # fmt: skip
        return {
            "request_id": "0", "model": "policy", "created": 0, "choices": [choice],
            "usage": {"prompt_tokens": prompt, "completion_tokens": tokens,
                      "total_tokens": prompt + tokens},
        }  # fmt: skip


class Server:
    """One server: its weights, its label, whether it is paused, and what it runs."""

    def __init__(self, model: str, number: int, fleet: "Fleet") -> None:
        self.policy, self.model, self.number, self.fleet = Policy(model), model, number, fleet
        self.label, self.loads, self.generated, self.paused = "default", 0, 0, False
        self.running: list[Sampled] = []

    def unanswered(self) -> list[Sampled]:
        return [request for request in self.running if not request.answer.done()]

    def finish(self, request: Sampled) -> None:
        request.advance(self.policy, self.label)
        self.generated += len(request.tokens)
        request.end()

    async def generate(self, body: dict[str, Any]) -> Answer:
        given = body["sampling_params"]
        odd = [k for k, v in given.items() if v not in (PARAMETERS.get(k, ()) or (v,))]
        if odd or body.get("stream"):
            return 400, _error(f"the scripted server cannot do {odd or 'stream'}")
        request = Sampled(body, self.loads)
        self.running.append(request)
        try:
            self.fleet.look()
            await request.answer
        finally:
            self.running.remove(request)
        return 200, request.body()

    def pause(self, mode: str) -> Answer:
        if mode not in ("abort", "wait", "keep"):
            return 422, {"detail": [{"loc": ["query", "mode"], "input": mode}]}
        for request in self.unanswered():
            if mode == "abort":
                request.end("abort")
            elif mode == "wait":
                self.finish(request)
            else:
                request.advance(self.policy, self.label, request.parameters["seed"] % 4)
        self.paused = True
        return 200, {"status": "paused"}

    def post(self, route: str, query: dict[str, str], body: Any) -> Answer:
        if route == "/pause":
            return self.pause(query.get("mode", "abort"))
        if route == "/resume":
            self.paused = False
            self.fleet.look()
            return 200, {"status": "resumed"}
        if route == "/reset_prefix_cache":
            forced = query.get("reset_running_requests", "").lower() in ("true", "1", "yes")
            return 200, {"success": forced or not self.unanswered()}
        if route == "/update_weight_version":
            self.label = body["new_version"]
            return 200, {"success": True, "new_version": self.label}
        if route == "/collective_rpc" and body["method"] == "get_model_inspection":
            return 200, {"results": [self._outline()]}
        if route == "/collective_rpc" and body["method"] == "reload_weights":
            try:
                body["digest"] = self.policy.load(body["kwargs"]["weights_path"])
            except (ValueError, RuntimeError, OSError) as error:
                return 500, _error(str(error))
            self.loads += 1
            return 200, {"results": [None]}
        return 404, {"detail": "Not Found"}

    def get(self, route: str) -> Answer:
        counter = 'vllm:generation_tokens_total{engine="0",model_name="policy"}'
        card = {"id": "policy", "object": "model", "root": self.model, "max_model_len": 128}
        answers: dict[str, Any] = {
            "/health": None,
            "/version": {"version": "0.32.0"},
            "/v1/models": {"object": "list", "data": [card]},
            "/server_info": {"vllm_config": self._config()},
            "/metrics": f"{counter} {self.generated}.0\n",
            "/weight_info": {"weight_version": self.label},
            "/is_paused": {"is_paused": self.paused},
            "/get_world_size": {"world_size": 1},
            "/load": {"server_load": len(self.running)},
        }
        return (200, answers[route]) if route in answers else (404, {"detail": "Not Found"})

    def _config(self) -> dict[str, Any]:
        model = {
            "model": self.model, "dtype": "torch.float32", "max_model_len": 128,
            "logprobs_mode": "processed_logprobs", "quantization": None, "hf_overrides": {},
        }  # fmt: skip
        return {
            "model_config": model, "device_config": {"device": "cpu"},
            "scheduler_config": {"enable_chunked_prefill": False, "max_num_seqs": 256},
            "parallel_config": {"world_size": 1}, "weight_transfer_config": None,
        }  # fmt: skip

    def _outline(self) -> str:
        config = self.policy.model.config
        layers = config.num_hidden_layers
        return (
            f"Policy(\n  (model): Model(\n    (embed_tokens): VocabParallelEmbedding(embedding_dim="
            f"{config.hidden_size}, org_vocab_size={config.vocab_size}, tp_size=1)\n    (layers): "
            f"ModuleList()(\n      (0-{layers - 1}): {layers} x Layer()\n    )\n  )\n)\n"
        )


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "BadRequestError", "param": None, "code": 400}}


class Fleet:
    """The servers, their script and their record."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.script = settings["script"]
        self.events: list[dict[str, Any]] = []
        self.polled: set[str] = set()
        self.asked: set[str] = set()  # completions asked for at the training temperature
        self.released_steps = 0
        self._releasing: asyncio.Task[None] | None = None
        problems = Path(self.script["problems"]).read_text().splitlines() if self.script else []
        self.ids = {f"{row['problem']}=": row["id"] for row in map(json.loads, problems)}
        self.tokenizer = AutoTokenizer.from_pretrained(settings["model"])
        self.servers = [Server(settings["model"], n, self) for n in range(settings["servers"])]

    def look(self) -> None:
        """Answer what may be answered now."""
        for server in self.servers:
            for request in [] if server.paused else server.unanswered():
                if not self._is_held(request):
                    server.finish(request)
        if self.script and (self._releasing is None or self._releasing.done()) and self._is_due():
            self.released_steps += 1
            self._releasing = asyncio.get_running_loop().create_task(self._release())

    def _is_held(self, request: Sampled) -> bool:
        return bool(self.script) and request.parameters["temperature"] == 1.0

    def _is_due(self) -> bool:
        """Whether all servers have the weights of the next step, and all requests that the run may
        make by then have arrived."""
        script, step = self.script, self.released_steps + 1
        ready = all(
            not server.paused and server.label.endswith(f"/{step - 1}") for server in self.servers
        )
        groups = min(script["ahead"] + step, script["steps"]) * script["groups_per_step"]
        return ready and len(self.asked) >= groups * script["group_size"]

    async def _release(self) -> None:
        """Answer the groups of a step, the oldest first, one when the one before is graded."""
        for _ in range(self.script["groups_per_step"]):
            held = [
                (request.key, server, request)
                for server in self.servers
                for request in server.unanswered()
                if self._is_held(request)
            ]
            if not held:
                return  # a pause that does not freeze has answered them
            held.sort(key=lambda each: each[0])
            first = held[0][0][:2]
            text = self.tokenizer.decode(first[1], skip_special_tokens=True)
            marks = Path(self.script["marks"]) / self.ids[text]
            marks.unlink(missing_ok=True)  # a reward function is tried out when a run opens
            for key, server, request in held:
                if key[:2] == first:
                    server.finish(request)
            while not marks.exists() or marks.stat().st_size < 2 * self.script["group_size"]:
                await asyncio.sleep(0.01)

    async def handle(self, server: Server, request: web.Request) -> web.Response:
        raw = await request.read()
        body, query = json.loads(raw) if raw else None, dict(request.query)
        name = f"{request.method} {request.path}"
        if name in POLLED:
            self.polled.add(name)
        elif name != "POST /inference/v1/generate":
            event = {"server": server.number, "route": name, "query": query, "body": body}
            self.events.append(event)
        if name == "POST /inference/v1/generate":
            self.events.append({"loads": server.loads, "body": body})
            if body["sampling_params"]["temperature"] == 1.0:
                self.asked.add(json.dumps([body["token_ids"], body["sampling_params"]["seed"]]))
            status, answer = await server.generate(body)
        elif request.method == "POST":
            status, answer = server.post(request.path, query, body)
        else:
            status, answer = server.get(request.path)
        if answer is None or isinstance(answer, str):
            return web.Response(status=status, text=answer)
        return web.json_response(answer, status=status)

    def record(self) -> dict[str, Any]:
        """Completions by the weights before them, then by content, since concurrent ones have no
        order; control requests of each server in their order."""
        events = [_nameless(event) for event in self.events]
        asked = [event for event in events if "loads" in event]
        asked.sort(key=lambda event: (event["loads"], json.dumps(event)))
        control = [[e for e in events if e.get("server") == s.number] for s in self.servers]
        return {"completions": asked, "control": control, "polled": sorted(self.polled)}


def _nameless(value: Any) -> Any:
    """Without what differs from run to run: the run's own prefix of labels, folders, random ids."""
    if isinstance(value, dict):
        return {k: _nameless(v) for k, v in sorted(value.items()) if k != "request_id"}
    if isinstance(value, list):
        return [_nameless(each) for each in value]
    if isinstance(value, str):
        return re.sub(r"^[0-9a-f]{8}/", "RUN/", re.sub(r"^/.*", "FOLDER", value))
    return value


async def serve(settings: dict[str, Any]) -> None:
    fleet, ended, urls = Fleet(settings), asyncio.Event(), []
    for server in fleet.servers:

        async def handle(request: web.BaseRequest, server: Server = server) -> web.Response:
            return await fleet.handle(server, request)

        # As vLLM does, give a request up when its client hangs up.
        runner = web.ServerRunner(web.Server(handle, handler_cancellation=True))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    print(*urls, flush=True)
    await ended.wait()
    Path(settings["record"]).write_text(json.dumps(fleet.record(), indent=1))


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(serve(json.loads(sys.argv[1])))
