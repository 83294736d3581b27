"""The curve of a run is drawn from its evaluation files."""

import pytest
from test_statistics import SETTINGS, report

from grpo_replay.errors import EvaluationFileError
from grpo_replay.evaluation.curve import plot_curve, read_curve

SETTINGS_WITH_TITLES = {**SETTINGS, "bootstrap_samples": 100, "benchmarks": {}}


def write(folder, step: int, correct: int) -> None:
    found = report({"x": [[1]] * correct + [[0]] * (10 - correct)}, SETTINGS_WITH_TITLES)
    found.write(folder / f"step_{step:06d}.json")


def test_the_curve_is_ordered_by_step(tmp_path):
    assert plot_curve(tmp_path) is None
    for step, correct in ((100, 5), (0, 2), (20, 3)):
        write(tmp_path, step, correct)
    curve = read_curve(tmp_path)
    assert list(curve) == [0, 20, 100]
    assert [each.accuracies()["mean"] for each in curve.values()] == [0.2, 0.3, 0.5]
    assert all(each.samples is None for each in curve.values())
    assert plot_curve(tmp_path).read_bytes().startswith(b"\x89PNG")


def test_a_damaged_evaluation_is_named(tmp_path):
    write(tmp_path, 0, 1)
    (tmp_path / "step_000001.json").write_text("{")
    with pytest.raises(EvaluationFileError, match="step_000001"):
        plot_curve(tmp_path)
