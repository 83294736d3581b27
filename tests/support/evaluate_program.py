"""Evaluates the tiny base on a few problems: `evaluate_program.py OUTPUT RANK RANKS FOLDER`.

Prints how many completions this rank sampled. Run in processes of its own by the tests, to be
killed, or to be one of two ranks.
"""

import sys
from pathlib import Path

import torch

from grpo_replay.distributed.comm import Comm
from grpo_replay.engine.models import load_tokenizer
from grpo_replay.evaluation import cache
from grpo_replay.evaluation.benchmarks import plan_evaluation
from grpo_replay.evaluation.evaluate import evaluate
from grpo_replay.recipe import Recipe, load_recipe
from grpo_replay.rewards.scorer import RewardScorer
from grpo_replay.sampling.hf import HfSampler
from grpo_replay.sampling.sampler_protocol import SamplerOpening
from grpo_replay.tiny import BASE_DIR


def recipe() -> Recipe:
    overrides = ["eval.max_problems=12", "eval.samples=4", "sampling.max_batch_rollouts=24"]
    return load_recipe("tiny", [*overrides, "eval.reward=minerva", "reward.workers=1"])


class CountingSampler:
    def __init__(self, sampler: HfSampler) -> None:
        self.sampler, self.count = sampler, 0
        self.stop_token_ids = sampler.stop_token_ids

    def generate(self, requests):
        for completion in self.sampler.generate(requests):
            self.count += 1
            yield completion


def main() -> None:
    output, rank, ranks, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    cache.FLUSH_ROWS = 16
    cache.FLUSH_SECONDS = 3600.0  # on a busy machine too, a shard has as many rows
    generations = None if folder == "none" else Path(folder)
    print(f"sampled {evaluate_tiny(Path(output), rank, ranks, generations)}")


def evaluate_tiny(output: Path, rank: int, ranks: int, generations: Path | None) -> int:
    """The number of completions that this rank sampled."""
    torch.set_num_threads(1)
    group = None
    if ranks > 1:
        store = torch.distributed.FileStore(f"{output}.store", ranks)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        group = torch.distributed.group.WORLD
    settings = recipe()
    tokenizer = load_tokenizer(settings.model)
    sampler = CountingSampler(
        HfSampler.open(SamplerOpening.from_recipe(settings, str(BASE_DIR), Comm()))
    )
    plan = plan_evaluation(tokenizer, settings)
    comm = Comm(rank, ranks, group)
    with RewardScorer.open(settings.reward) as scorer:
        report = evaluate(
            sampler, tokenizer, plan, comm, scorer,
            model={"name": "tiny"}, generations_folder=generations,
        )  # fmt: skip
    assert (report is not None) == comm.is_main
    if report is not None:
        report.write(output)
    if ranks > 1:
        comm.barrier()  # neither leaves while the other still talks
        torch.distributed.destroy_process_group()
    return sampler.count


if __name__ == "__main__":
    main()
