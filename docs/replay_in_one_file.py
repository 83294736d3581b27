r"""GRPO with rollout replay in one file, to be read from top to bottom.

    python docs/replay_in_one_file.py                   # paper A: |advantage| replay: 59.4 %
    python docs/replay_in_one_file.py --preset grpo     # no replay: 57.8 %
    python docs/replay_in_one_file.py --preset fifo     # paper B: FIFO replay: 43.1 %

Paper A is Yoo et al., arXiv 2606.04560; paper B is Arnal et al., arXiv 2604.08706. A model of
160,000 parameters learns arithmetic on one CPU core: `47+38=` is to be completed by
`15,8\boxed{85}`. Only the base model, its tokenizer and the problems come from the package; the
whole method is here. The numbers are held-out accuracy after training (36.1 % before) at seed 42;
the package's runs end at 59.3, 57.8 and 43.1 %. A run takes less than a minute of processor time.

Departures from textbook GRPO (arXiv 2402.03300):
  1. The denominator of the importance ratio is the policy at the rollout's birth. Its log-probs
     are computed once and stored, for fresh and stored rollouts alike. It is never "the policy at
     the start of this step": an old rollout's ratio would be 1, and its staleness not corrected.
  2. A batch is all fresh rollouts and a draw of stored ones (paper A), or such a draw alone (paper
     B). Advantages are those of birth; nothing about a rollout is recomputed when it is replayed.
  3. A group whose rewards are all equal has no signal: paper A drops it, paper B keeps it.
  4. Clip-Higher (0.2 below, 0.28 above) and dual clip at 10; in paper B 0.2 on both sides. No KL.
  5. The loss is the mean over all tokens of the optimizer's mini-batch, not a mean of means.
  6. The standard deviation of a group divides by G: k of G correct then gives √((G-k)/k).

Departures from the package (`grpo-replay train tiny`, `train fifo-tiny`), whose settings and random
numbers these are: plain torch in one process instead of DeepSpeed; a box is compared as an integer
instead of by math-verify; no files, checkpoints and checks, nor other compositions, units, losses.
Draws, losses, gradients, advantages and evictions equal the package's, and so do whole runs until
rounding first changes a sampled token: all of fifo's, and 183 of the 240 steps of paper A's
(tests/docs/test_replay_in_one_file.py).

Suffixes are shapes: G completions of a group, N rollouts, R rows, P prompt tokens, T completion
tokens, L tokens of a padded row, V words, C the completion tokens of all rows, end to end.
"""

import argparse
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

from grpo_replay.tiny import BASE_DIR
from grpo_replay.tiny.problems import BENCHMARKS, benchmark_problems, train_problems


@dataclass(frozen=True)
class Settings:
    """The defaults are those of recipes/tiny.yaml: paper A on the tiny task."""

    steps: int = 240
    seed: int = 42
    prompts_per_step: int = 16
    group_size: int = 8  # G
    max_completion_tokens: int = 20
    buffer_only: bool = False  # paper B: insert before the draw, and train on stored rollouts only
    ratio: float = 1.0  # r, drawn per fresh survivor; if buffer_only B/R, drawn per generated one
    priority_exponent: float = 0.5  # α of P ∝ |A|^α; 0 is uniform
    with_replacement: bool = False
    drop_zero_variance: bool = True
    max_age_steps: int | None = 4  # τ_max
    warmup_steps: int = 20  # first steps, which fill the buffer and do not draw
    capacity: int = 30_000  # N, rollouts
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = 10.0
    updates_per_step: int = 2
    learning_rate: float = 7e-5
    weight_decay: float = 0.01


PRESETS = {
    "ours": Settings(),
    "grpo": Settings(ratio=0.0),
    "fifo": Settings(  # recipes/fifo-tiny.yaml: R = 16 into the newest N = 84, B = 60 drawn
        steps=200, prompts_per_step=1, group_size=16, buffer_only=True, ratio=3.75, capacity=84,
        priority_exponent=0.0, with_replacement=True, drop_zero_variance=False, max_age_steps=None,
        warmup_steps=0, clip_high=0.2, dual_clip=None, updates_per_step=1, learning_rate=5e-5,
        weight_decay=0.0,
    ),
}  # fmt: skip
EPSILON = 1e-6  # added to σ in the advantage, and to |A| in the priority
ORDER, DRAW, SPLIT = 0x70726F6D, 1, 2  # purposes of random streams


def stream(*path: int) -> np.random.Generator:
    """Make the random generator that depends only on `path`: seed, step, purpose."""
    return np.random.default_rng(path)


# --- the policy: sampling, and log-probs of what was sampled --------------------------------------


class Tokens(NamedTuple):
    """A prompt and one completion of it, with the end-of-sequence token if one was sampled."""

    prompt: list[int]  # P
    completion: list[int]  # T


def uniforms(key: Sequence[int], count: int) -> np.ndarray:
    """Uniform random numbers of one completion, [count], independent of the rest of the batch."""
    seed = np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> np.uint64(1)
    return np.random.Generator(np.random.Philox(key=int(seed))).random(count)


@torch.inference_mode()
def sample(
    model: PreTrainedModel, prompts: list[list[int]], keys: Sequence[Sequence[int]], longest: int
) -> list[Tokens]:
    """Sample a completion of each prompt at temperature 1, by inverse transform sampling."""
    eos, pad = model.config.eos_token_id, model.config.pad_token_id
    width = max(map(len, prompts))
    padding = [width - len(prompt) for prompt in prompts]  # on the left
    inputs = torch.tensor([[pad] * n + prompt for n, prompt in zip(padding, prompts)])
    mask = torch.tensor([[0] * n + [1] * (width - n) for n in padding])
    uniforms_RT = torch.from_numpy(np.stack([uniforms(key, longest) for key in keys]))
    cache, chosen = DynamicCache(), list[Tensor]()
    ended_R = torch.zeros(len(prompts), dtype=torch.bool)
    while len(chosen) < longest and not ended_R.all():
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -inputs.shape[1] :]
        logits_RV = model(
            input_ids=inputs, attention_mask=mask, position_ids=positions, past_key_values=cache
        ).logits[:, -1]
        cumulative_RV = logits_RV.softmax(-1).cumsum(-1, dtype=torch.float64)
        target_R1 = uniforms_RT[:, len(chosen), None] * cumulative_RV[:, -1:]
        inputs = torch.searchsorted(cumulative_RV, target_R1, right=True)
        mask = torch.cat([mask, torch.ones_like(inputs)], dim=1)
        ended_R |= inputs[:, 0] == eos
        chosen.append(inputs[:, 0])
    rows = torch.stack(chosen, dim=1).tolist()
    ends = [row.index(eos) + 1 if eos in row else longest for row in rows]
    return [Tokens(p, row[:end]) for p, row, end in zip(prompts, rows, ends)]


def logprobs(model: PreTrainedModel, rows: Sequence[Tokens]) -> Tensor:
    """Log-probs of the completion tokens, row after row, [C]. Causal attention never sees the
    padding on the right, so there is no mask."""
    ends = [len(row.prompt) + len(row.completion) for row in rows]
    ids_RL = torch.zeros(len(rows), max(ends), dtype=torch.int64)
    completion_RL = torch.zeros_like(ids_RL, dtype=torch.bool)
    for r, (row, end) in enumerate(zip(rows, ends)):
        ids_RL[r, :end] = torch.tensor(row.prompt + row.completion)
        completion_RL[r, len(row.prompt) : end] = True
    logits_RLV = model(input_ids=ids_RL, use_cache=False).logits
    logprobs_RLV = logits_RLV[:, :-1].log_softmax(-1)  # position i predicts token i + 1
    chosen_RL = logprobs_RLV.gather(-1, ids_RL[:, 1:, None])[..., 0]
    return chosen_RL[completion_RL[:, 1:]]


# --- rewards and advantages -----------------------------------------------------------------------


def reward(completion: str, answer: str) -> float:
    """Reward 1 if the last box has the answer, else -1."""
    boxes = re.findall(r"\\boxed\{(-?\d+)\}", completion)
    return 1.0 if boxes and int(boxes[-1]) == int(answer) else -1.0


def group_advantages(rewards_G: Sequence[float]) -> np.ndarray | None:
    """Advantages A = (r - μ) / (σ + ε), float32 [G]; None if all rewards are equal."""
    rewards = np.float32(rewards_G).astype(np.float64)
    if (rewards == rewards[0]).all():
        return None
    return ((rewards - rewards.mean()) / (rewards.std() + EPSILON)).astype(np.float32)


@dataclass(frozen=True, eq=False)
class Rollout:
    """One completion and everything computed at its birth, frozen. The unit of replay."""

    rollout_id: int
    birth_step: int
    tokens: Tokens
    behavior_logprobs: Tensor  # [T], of the policy at birth
    advantage: float


# --- the replay buffer ----------------------------------------------------------------------------


def draw_indices(
    priority_N: np.ndarray, count: int, settings: Settings, rng: np.random.Generator
) -> np.ndarray:
    """Draw indices with P(i) = p_i^α / Σ p^α, int64, in the order drawn.

    Without replacement these are successive draws from the remaining rollouts, the distribution of
    numpy's `Generator.choice(replace=False, p=P)`, by Gumbel-top-k (Efraimidis and Spirakis 2006):
    the `count` smallest keys ln E_i - α ln p_i, with E_i exponential.
    """
    if count == 0 or priority_N.size == 0:
        return np.zeros(0, dtype=np.int64)
    log_weight_N = settings.priority_exponent * np.log(priority_N)
    if settings.with_replacement:
        cumulative_N = np.exp(log_weight_N).cumsum()
        return np.searchsorted(cumulative_N, rng.random(count) * cumulative_N[-1], side="right")
    key_N = np.log(rng.standard_exponential(priority_N.size)) - log_weight_N
    return np.argsort(key_N, kind="stable")[:count]


@dataclass
class ReplayBuffer:
    """Stored rollouts in the order of insertion, oldest first. A draw removes none. A rollout is
    evicted by its age in training steps, or as the oldest if the buffer is over its capacity."""

    settings: Settings
    rollouts: list[Rollout] = field(default_factory=list)

    def insert(self, fresh: Sequence[Rollout]) -> None:
        """Append fresh rollouts; evict the oldest beyond the capacity."""
        self.rollouts = [*self.rollouts, *fresh][-self.settings.capacity :]

    def evict(self, now: int) -> None:
        """Remove the rollouts that are older than the maximum age at step `now`."""
        max_age = self.settings.max_age_steps
        if max_age is not None:
            self.rollouts = [r for r in self.rollouts if now - r.birth_step <= max_age]

    def draw(self, count: int, rng: np.random.Generator) -> list[Rollout]:
        """Draw `count` rollouts; without replacement, at most all."""
        advantage_N = np.array([r.advantage for r in self.rollouts], dtype=np.float64)
        indices = draw_indices(np.abs(advantage_N) + EPSILON, count, self.settings, rng)
        return [self.rollouts[i] for i in indices]


def draw_count(settings: Settings, step: int, fresh: int) -> int:
    """Number of rollouts to draw. Paper A trains on them and on all fresh survivors; paper B on
    them alone, because its buffer already has this step's rollouts."""
    if settings.buffer_only:
        return round(settings.ratio * settings.prompts_per_step * settings.group_size)
    return round(settings.ratio * fresh) if step > settings.warmup_steps else 0


# --- the loss -------------------------------------------------------------------------------------


def policy_loss(
    logprobs_C: Tensor, behavior_C: Tensor, advantage_C: Tensor, settings: Settings
) -> tuple[Tensor, Tensor]:
    """Compute the loss of one mini-batch, and where the clip removed the gradient, bool [C].

    -max(min(ρA, clip(ρ, 1-ε_low, 1+ε_high)·A), c·A if A < 0), mean over all tokens.
    """
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    ratio_C = (logprobs_C - behavior_C).clamp(-20, 20).exp()  # ρ; the clamp keeps exp finite
    surrogate_C = torch.minimum(ratio_C * advantage_C, ratio_C.clamp(low, high) * advantage_C)
    negative_C = advantage_C < 0
    clipped_C = torch.where(negative_C, ratio_C < low, (ratio_C > high) & (advantage_C > 0))
    if settings.dual_clip is not None:
        floor_C = settings.dual_clip * advantage_C
        surrogate_C = torch.where(negative_C, torch.maximum(surrogate_C, floor_C), surrogate_C)
        clipped_C |= negative_C & (ratio_C > settings.dual_clip)
    return -surrogate_C.mean(), clipped_C


def batch_loss(
    model: PreTrainedModel, rollouts: Sequence[Rollout], settings: Settings
) -> tuple[Tensor, Tensor]:
    """Compute the differentiable loss of a mini-batch, and its clipped tokens, bool [C]."""
    logprobs_C = logprobs(model, [r.tokens for r in rollouts])
    behavior_C = torch.cat([r.behavior_logprobs for r in rollouts])
    lengths_R = torch.tensor([len(r.tokens.completion) for r in rollouts])
    advantage_R = torch.tensor([r.advantage for r in rollouts])
    return policy_loss(logprobs_C, behavior_C, advantage_R.repeat_interleave(lengths_R), settings)


# --- training -------------------------------------------------------------------------------------


@dataclass
class StepReport:
    """Statistics of one step. `clipped` has a bool for each token of fresh and drawn rollouts."""

    step: int
    rewards_N: list[float]
    fresh: list[Rollout]
    drawn: list[Rollout]
    losses: list[float] = field(default_factory=list)  # of each update
    clipped: tuple[list[bool], list[bool]] = field(default_factory=lambda: ([], []))


class Trainer:
    """The policy, its optimizer, the buffer and the problems."""

    def __init__(self, s: Settings) -> None:
        self.settings, self.buffer, self.problems = s, ReplayBuffer(s), train_problems(s.seed)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(BASE_DIR)
        self.model = AutoModelForCausalLM.from_pretrained(BASE_DIR, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), s.learning_rate, (0.9, 0.99), weight_decay=s.weight_decay
        )

    def train_step(self, step: int) -> StepReport:
        """Run one step of paper A's Algorithm 1, or of the deterministic form of paper B."""
        s, buffer = self.settings, self.buffer
        fresh, rewards_N = self.generate(step)
        buffer.evict(step)  # a safeguard: the step before has done it at its end
        if s.buffer_only:
            buffer.insert(fresh)
        drawn = buffer.draw(draw_count(s, step, len(fresh)), stream(s.seed, step, DRAW))
        report = StepReport(step, rewards_N, fresh, drawn)
        self.update([] if s.buffer_only else fresh, report)
        if not s.buffer_only:
            buffer.insert(fresh)  # after the draw: nothing is replayed in the step of its birth
        buffer.evict(step + 1)
        return report

    def generate(self, step: int) -> tuple[list[Rollout], list[float]]:
        """Sample and score the groups of the step. Returns the survivors, and all rewards."""
        s, n = self.settings, self.settings.prompts_per_step
        members = [(i, g) for i in range(n) for g in range(s.group_size)]
        problems = [self.problem((step - 1) * n + i) for i, _ in members]
        rows, rewards_N = self.answer(problems, [(s.seed, step, i, g) for i, g in members])
        with torch.no_grad():  # by the policy that sampled them, and never computed again
            behavior_C = logprobs(self.model, rows)
        behavior = behavior_C.split([len(row.completion) for row in rows])
        first_id, fresh = (step - 1) * len(rows), list[Rollout]()
        for first in range(0, len(rows), s.group_size):
            advantages_G = group_advantages(rewards_N[first : first + s.group_size])
            if advantages_G is None and not s.drop_zero_variance:
                advantages_G = np.zeros(s.group_size, dtype=np.float32)
            for i, advantage in enumerate([] if advantages_G is None else advantages_G, first):
                fresh.append(Rollout(first_id + i, step, rows[i], behavior[i], float(advantage)))
        return fresh, rewards_N

    def problem(self, position: int) -> dict[str, str]:
        """The problem at a position of the run: every epoch visits all, in an order of its own."""
        epoch, offset = divmod(position, len(self.problems))
        order = stream(self.settings.seed, ORDER, epoch).permutation(len(self.problems))
        return self.problems[order[offset]]

    def answer(
        self, problems: Sequence[dict[str, str]], keys: Sequence[Sequence[int]]
    ) -> tuple[list[Tokens], list[float]]:
        """Sample a completion of each problem, and score it."""
        prompts = [self.tokenizer(row["problem"] + "=")["input_ids"] for row in problems]
        rows = sample(self.model, prompts, keys, self.settings.max_completion_tokens)
        texts = self.tokenizer.batch_decode([r.completion for r in rows], skip_special_tokens=True)
        return rows, [reward(text, row["answer"]) for text, row in zip(texts, problems)]

    def update(self, fresh: Sequence[Rollout], report: StepReport) -> None:
        """Split the batch at random into even mini-batches; make an optimizer update on each."""
        s, batch = self.settings, [*fresh, *report.drawn]
        order = stream(s.seed, report.step, SPLIT).permutation(len(batch))
        for indices in filter(len, np.array_split(order, s.updates_per_step)):
            mini_batch = [batch[i] for i in indices]
            loss, clipped_C = batch_loss(self.model, mini_batch, s)
            self.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            report.losses.append(loss.item())
            lengths = [len(rollout.tokens.completion) for rollout in mini_batch]
            for i, clipped_T in zip(indices, clipped_C.split(lengths)):
                report.clipped[int(i >= len(fresh))].extend(clipped_T.tolist())

    def accuracy(self, samples: int = 4) -> float:
        """Share of correct completions of held-out problems, the mean of the five benchmarks."""
        shares = []
        for name in BENCHMARKS:
            held_out = benchmark_problems(name)
            indices = [(i, k) for k in range(samples) for i in range(len(held_out))]
            keys = [(42, crc32(name.encode()), i, k) for i, k in indices]
            _, rewards = self.answer([held_out[i] for i, _ in indices], keys)
            shares.append(np.mean(np.array(rewards) > 0))
        return float(np.mean(shares))


def table_row(report: StepReport) -> str:
    """Format one line of the table that a run prints."""
    ages = [report.step - rollout.birth_step for rollout in report.drawn]
    age = f"{np.mean(ages):.1f}/{max(ages)}" if ages else "–"
    clip = [f"{100 * np.mean(tokens):.1f} %" if tokens else "–" for tokens in report.clipped]
    numbers = f"{report.step:4}  {np.mean(report.rewards_N):+6.2f}  {len(report.fresh):5}"
    return f"{numbers}  {len(ages):5}  {age:>12}  {' / '.join(clip):>19}"


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO with rollout replay in one file.")
    parser.add_argument("--preset", choices=PRESETS, default="ours")
    parser.add_argument("--seed", type=int, default=42)
    options = parser.parse_args()
    torch.set_num_threads(1)
    trainer = Trainer(replace(PRESETS[options.preset], seed=options.seed))
    print(f"held-out accuracy before training: {100 * trainer.accuracy():.1f} %\n")
    print("step  reward  fresh  drawn  age mean/max  clipped fresh/drawn")
    for step in range(1, trainer.settings.steps + 1):
        report = trainer.train_step(step)
        if step % 20 == 0:
            print(table_row(report), flush=True)
    print(f"\nheld-out accuracy after training: {100 * trainer.accuracy():.1f} %")
    print(f"{time.process_time():.0f} s of processor time")


if __name__ == "__main__":
    main()
