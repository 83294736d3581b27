"""Every benchmark loads and tells its options, and what two of them compute by hand."""

import sys
from pathlib import Path
from runpy import run_path

import pytest
from against_trl import seconds_to

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = [path for path in BENCHMARKS.glob("*.py") if "ArgumentParser" in path.read_text()]


@pytest.mark.parametrize("script", sorted(SCRIPTS), ids=lambda path: path.stem)
def test_a_benchmark_tells_its_options(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    with pytest.raises(SystemExit) as ended:
        run_path(str(script), run_name="__main__")
    assert ended.value.code == 0 and "usage:" in capsys.readouterr().out


@pytest.mark.parametrize(
    "level, held_out, seconds",
    [
        (0.40, (0.40, 0.50, 0.60), 11.0),
        (0.45, (0.40, 0.50, 0.60), 12.0),  # between two evaluations
        (0.55, (0.40, 0.50, 0.60), 14.0),
        (0.61, (0.40, 0.50, 0.60), float("inf")),
        (0.50, (0.40, 0.50, 0.30), 13.0),  # a later fall does not count
        (0.30, (0.40, 0.50, 0.60), 11.0),
    ],
)
def test_when_a_run_beside_trl_reached_a_level(level, held_out, seconds):
    """Ten seconds to the first step, one for each further one; evaluated after steps 2, 4, 6."""
    accuracy = dict(zip(("2", "4", "6"), held_out, strict=True))
    run = {"cpu": [10.0, 11.0, 12.0, 13.0, 14.0, 15.0], "accuracy": accuracy}
    assert seconds_to(level, run, "cpu") == pytest.approx(seconds)
