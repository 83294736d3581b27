"""The judgements of the campaigns on asynchronous runs: each can fail."""

import random
import time

import async_soak
import pytest
from async_parts.run_process import RunProcess, balances


def samples(rise: float, jumps: float = 0.0) -> list[dict[str, float]]:
    """Thirty minutes at ten seconds, with a rise of memory over the last two thirds."""
    chance = random.Random(1)
    return [
        {
            "seconds": 10.0 * index,
            "trainer, MiB": 600 + rise * (index - 60) / 120 + chance.uniform(-jumps, jumps),
            "trainer, files": 40,
        }
        for index in range(180)
    ]


@pytest.mark.parametrize("rise, code", [(0.0, 0), (15.0, 0), (25.0, 1), (300.0, 1)])
def test_a_soak_fails_if_memory_rises(rise, code, capsys):
    """3 % of 600 MiB are allowed."""
    assert async_soak.report(samples(rise)) == code
    assert ("False" in capsys.readouterr().out) == bool(code)


def test_a_soak_does_not_fail_for_noise():
    assert async_soak.report(samples(0.0, jumps=30.0)) == 0


def test_a_soak_fails_if_a_process_is_missing_from_a_sample():
    found = samples(0.0)
    del found[100]["trainer, files"]
    assert async_soak.report(found) == 1


def line(lost: int) -> dict[str, int]:
    ends = {"inserted": 3, "zero_variance": 1, "no_reward": 1, "stale": 0, "cancelled": 0}
    ends |= {"lost": lost, "generated": 7, "in_flight": 1}
    return {
        f"ledger/{name}_{unit}": n for name, n in ends.items() for unit in ("rollouts", "tokens")
    }


def test_a_ledger_balances_or_not():
    assert balances(line(lost=1))
    assert not balances(line(lost=0))
    assert not balances(line(lost=1) | {"ledger/generated_tokens": 8})


def test_steps_that_an_earlier_attempt_wrote_do_not_count_for_the_next(tmp_path):
    """A kill waits for a step of its own attempt."""
    run = RunProcess("tiny-async", tmp_path, [])
    assert run.steps_since(0) == 0
    (tmp_path / "metrics.jsonl").write_text("{}\n" * 7)
    assert run.steps() == 7 == run.steps_since(time.time() - 60)
    assert run.steps_since(time.time() + 1) == 0
