"""What TRL's AsyncGRPOTrainer needs and a CPU does not have: FlashAttention 3, a vLLM server with
its worker process, and weights sent to it. Planner, collator, loss and optimizer are TRL's."""

import queue
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, async_grpo_trainer, packing
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample
from trl_runs import BASE, reward

from grpo_replay.tiny.problems import PROMPT_TEMPLATE, train_problems

GROUPS = 4


def flash_attn_varlen_func(q, k, v, cu_q, cu_k, *_: Any, softmax_scale=None, **__: Any):
    """FA3's: segment by segment, causal and aligned at the end."""
    parts = []
    for a, b, c, d in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True):
        query, key, value = (x.transpose(0, 1) for x in (q[a:b], k[c:d], v[c:d]))
        sees = torch.ones(b - a, d - c, dtype=torch.bool).tril(int(d - c) - int(b - a))
        out = scaled_dot_product_attention(
            query, key, value, attn_mask=sees, scale=softmax_scale, enable_gqa=True
        )
        parts.append(out.transpose(0, 1))
    return torch.cat(parts)


class Sampler:
    """The server, and how weights come to it."""

    def __init__(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32).eval()

    @torch.no_grad()
    def send_weights(self, iterator: Any) -> None:
        own = dict(self.model.named_parameters())
        for name, tensor in iterator:
            own[name].copy_(tensor)

    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def destroy(self) -> None: ...

    def complete(self, prompt: list[int], count: int, seed: int):
        """(tokens, log-probs) of each completion."""
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(seed)
            out = self.model.generate(
                torch.tensor([prompt] * count), do_sample=True, top_k=0, max_new_tokens=20,
                return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip
        tokens = out.sequences[:, len(prompt) :]
        logprobs = torch.stack(out.logits, 1).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
        for row, of_row in zip(tokens.tolist(), logprobs, strict=True):
            end = row.index(1) + 1 if 1 in row else len(row)  # 1 ends a text
            yield row[:end], of_row[:end].numpy()


class Worker:
    """TRL's worker and its queue. It samples when it is asked for more than it has: the policy of
    then, so a run is the same each time. `late` is how many policies before that it says."""

    def __init__(self, sampler: Sampler, rows: Any, size: int, late: int = 0) -> None:
        self.sampler, self.rows, self.size, self.late = sampler, rows, size, late
        self.tokenizer = AutoTokenizer.from_pretrained(BASE)
        self.rollout_buffer, self.metrics_queue = self, queue.Queue()
        self.version, self.group, self._ready = 0, 0, []

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def check_health(self, _: float) -> None: ...
    def qsize(self) -> int:
        return len(self._ready)

    def update_model_version(self, version: int) -> None:
        self.version = version

    def get(self, timeout: float | None = None) -> RolloutSample:
        if not self._ready:
            row = self.rows[self.group % len(self.rows)]
            prompt = self.tokenizer(PROMPT_TEMPLATE.format(problem=row["problem"]))["input_ids"]
            found = [*self.sampler.complete(prompt, self.size, seed=self.group)]
            texts = [self.tokenizer.decode(tokens[:-1]) for tokens, _ in found]
            scores = np.array(reward(texts, [str(row["answer"])] * self.size))
            advantages = (scores - scores.mean()) / (scores.std() + 1e-8)
            self._ready = [
                RolloutSample(
                    prompt=[], completion=[], group_id=self.group,
                    input_ids=np.array(prompt + tokens),
                    completion_mask=np.repeat([0, 1], [len(prompt), len(tokens)]),
                    old_log_probs=np.append(np.zeros(len(prompt)), logprobs).astype(np.float32),
                    advantage=float(advantage), model_version=max(1, self.version - self.late),
                    metrics={"reward": float(score)},
                )
                for (tokens, logprobs), score, advantage in zip(
                    found, scores, advantages, strict=True
                )
            ]  # fmt: skip
            self.group += 1
        return self._ready.pop(0)


def make(folder: Any, kind: Any, late: int = 0, problems: int = 50, **changes: Any) -> Any:
    """A trainer of steps of 32 rollouts, four prompts of eight."""
    torch.set_num_threads(1)
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    async_grpo_trainer.VLLMClient = lambda *_: None  # for a server, of which there is none
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None  # asks CUDA for its name
    replay = {name: changes.pop(name) for name in ("replay",) if name in changes}
    settings = {
        "output_dir": str(folder), "use_cpu": True, "bf16": False, "report_to": [], "seed": 1,
        "max_steps": 6, "per_device_train_batch_size": 8 * GROUPS, "num_generations": 8,
        "max_completion_length": 20, "gradient_checkpointing": False, "logging_steps": 1,
        "learning_rate": 1e-4, "save_strategy": "no", "token_budget": 0, "max_staleness": 2,
        "gradient_accumulation_steps": 1, "disable_tqdm": True,
    }  # fmt: skip
    rows, sampler = train_problems(1)[:problems], Sampler()
    return kind(
        str(BASE), reward, AsyncGRPOConfig(**settings | changes),
        Dataset.from_dict({"prompt": [[]]}), processing_class=AutoTokenizer.from_pretrained(BASE),
        rollout_worker=Worker(sampler, rows, 8, late), weight_transfer=sampler, **replay,
    )  # fmt: skip
