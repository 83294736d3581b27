"""Checks of checkpoints: the saved buffer is the one recomputed from the logs."""

from pathlib import Path

import numpy as np

from grpo_replay.lab.verification.run_files import Columns, RunFiles, read_snapshot_columns
from grpo_replay.lab.verification.store import Store
from grpo_replay.lab.verification.verification_report import Tally


def check_snapshot(run: RunFiles, store: Store, step: int, path: Path, tally: Tally) -> None:
    """Check content, order and uses, and behaviour log-probs bit for bit against those at birth."""
    columns, bits, written_at = read_snapshot_columns(path)
    tally.expect(written_at == step, f"checkpoint {step}: its buffer is of step {written_at}")
    expected_ids = run.rollouts["rollout_id"][store.rows].tolist()
    if not tally.expect(
        columns["rollout_id"].tolist() == expected_ids,
        f"checkpoint {step}: holds {len(columns['rollout_id'])} rollouts, expected "
        f"{len(expected_ids)}, or in another order",
    ):
        return
    _check_uses(columns, store, step, tally)
    stored = np.array(store.rows, dtype=np.int64)
    for logged, rows in run.rows_of_step.items():
        if not ((rows.start <= stored) & (stored < rows.stop)).any():
            continue
        born = run.behavior_logprobs_of_step(logged)
        for rollout_id in set(born) & set(bits):
            tally.expect(
                born[rollout_id] == bits[rollout_id],
                f"checkpoint {step}, rollout {rollout_id}: behaviour log-probs are not those at "
                "birth",
            )


def _check_uses(columns: Columns, store: Store, step: int, tally: Tally) -> None:
    expected = {
        "times_used": store.uses[store.rows],
        "last_used_step": store.last_use[store.rows],
    }
    for name, values in expected.items():
        _check_column(columns, name, values, step, tally)


def _check_column(
    columns: Columns, name: str, expected_N: np.ndarray, step: int, tally: Tally
) -> None:
    ids, found_N = columns["rollout_id"], columns[name]
    tally.expect_all(
        found_N == expected_N,
        lambda i: (
            f"checkpoint {step}, rollout {ids[i]}: {name} {found_N[i]}, recomputed {expected_N[i]}"
        ),
    )
