"""Choose the problems of the recipe `tiny-rare`: those that the tiny base hardly ever solves.

    python benchmarks/make_rare_problems.py

Writes recipes/tiny-rare/train.jsonl, rare.jsonl and hard.jsonl (both held out). Every problem of
the tiny task that is not held out there is sampled 32 times, and chosen if at most two samples are
correct; `base_correct` of a row counts 32 fresh samples, as the first ones were selected for.
The hard tier has the products of `tiny_mul` that need an entry of the multiplication table that the
base misremembers (tiny_pupil.py). No training problem has the operands of a held-out one, also not
exchanged. Takes three minutes on one thread.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tiny_pupil import Habits, misremembered_products
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_replay.sampling.hf import HfSampler
from grpo_replay.shipped_recipes import shipped_recipes_folder
from grpo_replay.tiny import BASE_DIR
from grpo_replay.tiny.problems import BENCHMARKS, PROMPT_TEMPLATE, operand_pool, problem_row
from grpo_replay.tiny.text_problems import last_number
from grpo_replay.types import GenerationRequest, RequestKey, completion_seed

SAMPLES, MOST_CORRECT = 32, 2
SELECTION_SEED, FRESH_SEED, SPLIT_SEED = 11, 12, 13
AT_ONCE = 64
"""Problems that are sampled together."""

HELD_OUT = {"rare": 300, "hard": 100}
TRAINED_ON = {"rare": 600, "hard": 100}
"""Problems of each tier; of the hard one all that remain are trained on."""

Problem = dict[str, str | int]


class Base:
    """Counts how often the tiny base solves a problem."""

    def __init__(self) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(BASE_DIR)
        model = AutoModelForCausalLM.from_pretrained(BASE_DIR)
        ids = self.tokenizer.eos_token_id, self.tokenizer.pad_token_id
        self.sampler = HfSampler(model, [ids[0]], ids[1], AT_ONCE * SAMPLES)

    def correct(self, rows: Sequence[Problem], seed: int) -> list[int]:
        """Correct samples of each problem, of `SAMPLES`."""
        counts = [0] * len(rows)
        for first in range(0, len(rows), AT_ONCE):
            members = range(first, min(first + AT_ONCE, len(rows)))
            requests = [each for place in members for each in self._requests(rows, place, seed)]
            for completion in self.sampler.generate(requests):
                place = completion.key.prompt_index
                text = self.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
                counts[place] += last_number(text, str(rows[place]["answer"])) == 1
        return counts

    def _requests(self, rows: Sequence[Problem], place: int, seed: int) -> list[GenerationRequest]:
        prompt = PROMPT_TEMPLATE.format(problem=rows[place]["problem"])
        ids = np.array(self.tokenizer(prompt).input_ids, np.int32)
        keys = [RequestKey(0, place, sample) for sample in range(SAMPLES)]
        return [GenerationRequest(key, ids, completion_seed(seed, key), 20) for key in keys]


def tier_of(row: Problem) -> str:
    """`rare` or `hard`."""
    a, b, *_ = map(int, re.findall(r"\d+", str(row["problem"])))
    needed = {frozenset((digit, b)) for digit in divmod(a, 10)}
    misremembered = needed & misremembered_products(Habits()).keys()
    return "hard" if row["benchmark"] == "tiny_mul" and misremembered else "rare"


def operands_key(row: Problem) -> tuple[object, ...]:
    """Equal for problems with the same operands in another order."""
    return row["benchmark"], *sorted(re.findall(r"\d+", str(row["problem"])))


def split(rows: Sequence[Problem], held_out: int, trained_on: int) -> tuple[list[Problem], ...]:
    """Held-out and training problems, from rows in random order."""
    taken = rows[:held_out]
    keys = {operands_key(row) for row in taken}
    return list(taken), [row for row in rows[held_out:] if operands_key(row) not in keys][
        :trained_on
    ]


def write(path: Path, rows: Sequence[Problem]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    fresh = np.array([row["base_correct"] for row in rows]) / SAMPLES
    print(f"{path.name}: {len(rows)} problems, base {100 * fresh.mean():.1f} % on fresh samples")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = shipped_recipes_folder() / "tiny-rare"
    parser.add_argument("--output", type=Path, default=default, metavar="DIR")
    output = parser.parse_args().output
    torch.set_num_threads(1)
    base, rng = Base(), np.random.default_rng(SPLIT_SEED)
    rows: list[Problem] = [
        dict(problem_row(name, operands)) for name in BENCHMARKS for operands in operand_pool(name)
    ]
    counts = base.correct(rows, SELECTION_SEED)
    chosen = [row for row, count in zip(rows, counts) if count <= MOST_CORRECT]
    print(f"{len(chosen)} of {len(rows)} problems have at most {MOST_CORRECT} correct samples")
    output.mkdir(parents=True, exist_ok=True)
    training: list[Problem] = []
    for tier in HELD_OUT:
        members = [row for row in chosen if tier_of(row) == tier]
        print(f"{tier}: {len(members)} of them")
        shuffled = [members[i] for i in rng.permutation(len(members))]
        held_out, trained_on = split(shuffled, HELD_OUT[tier], TRAINED_ON[tier])
        for row, count in zip(both := held_out + trained_on, base.correct(both, FRESH_SEED)):
            row["base_correct"] = count
        write(output / f"{tier}.jsonl", held_out)
        training += trained_on
    write(output / "train.jsonl", [training[i] for i in rng.permutation(len(training))])


if __name__ == "__main__":
    main()
