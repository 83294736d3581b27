"""Synthetic runs to inspect, made once per session: `pytest_plugins = "inspected_runs"`."""

from pathlib import Path

import pytest
from synthetic_run import PRESETS, write_synthetic_run


@pytest.fixture(scope="session")
def runs(tmp_path_factory) -> dict[str, Path]:
    """One synthetic run of 24 steps for each preset; read only."""
    folder = tmp_path_factory.mktemp("runs")
    return {preset: write_synthetic_run(folder / preset, preset).folder for preset in PRESETS}
