"""Every benchmark loads and tells its options."""

import sys
from pathlib import Path
from runpy import run_path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = [path for path in BENCHMARKS.glob("*.py") if "ArgumentParser" in path.read_text()]


@pytest.mark.parametrize("script", sorted(SCRIPTS), ids=lambda path: path.stem)
def test_a_benchmark_tells_its_options(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    with pytest.raises(SystemExit) as ended:
        run_path(str(script), run_name="__main__")
    assert ended.value.code == 0 and "usage:" in capsys.readouterr().out
