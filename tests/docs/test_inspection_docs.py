"""docs/buffer.md and docs/planning.md say what the code does."""

import re
from pathlib import Path

import pytest

from grpo_replay.lab.inspection.rows import DERIVED, USES
from grpo_replay.lab.planning.theory import power_law_optimum
from grpo_replay.recipe import ReplaySection
from grpo_replay.replay.snapshot import SNAPSHOT_SCHEMA
from grpo_replay.storage.rollout_log import DRAW_SCHEMA, ROLLOUT_FILE_SCHEMA

DOCS = Path(__file__).parents[2] / "docs"
BUFFER = (DOCS / "buffer.md").read_text(encoding="utf-8")
PLANNING = (DOCS / "planning.md").read_text(encoding="utf-8")


def test_every_column_is_described_with_its_type():
    rows = [line.split("|") for line in BUFFER.splitlines() if line.startswith("| `")]
    types = {}
    for cells in rows:
        for name in re.findall(r"`(\w+)`", cells[1]):
            types[name] = cells[2].strip()
    checked = 0
    for schema in (ROLLOUT_FILE_SCHEMA, SNAPSHOT_SCHEMA, DRAW_SCHEMA):
        for field in schema:
            expected = {"double": "float64", "float": "float32"}.get(
                str(field.type), str(field.type)
            )
            expected = re.sub(r"list<\w+: (\w+)>", r"list<\1>", expected)
            expected = expected.replace("list<float>", "list<float32>")
            assert types[field.name] == expected, field.name
            checked += 1
    assert checked == len(ROLLOUT_FILE_SCHEMA) + len(SNAPSHOT_SCHEMA) + len(DRAW_SCHEMA)


def test_every_derived_column_is_named():
    for name, _ in (*DERIVED, *USES):
        assert f"`{name}`" in BUFFER


def test_every_replay_setting_that_a_remedy_names_exists():
    remedies = re.findall(r"(?:raise|lower) `(\w+)`", BUFFER)
    assert len(remedies) >= 6
    assert set(remedies) <= set(ReplaySection.model_fields)


def test_every_image_is_shown_on_a_page_and_small():
    pages = [DOCS.parent / "README.md", *DOCS.glob("*.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    shown = set(re.findall(r"\]\((?:docs/)?images/([^)]+)\)", text))
    assert shown == {path.name for path in (DOCS / "images").iterdir()}
    assert len(shown) >= 6
    for name in shown:
        assert 0 < (DOCS / "images" / name).stat().st_size < 150_000


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", BUFFER, re.DOTALL))
def test_the_loading_examples_run(runs, block, tmp_path, monkeypatch):
    library = re.search(r"import (\w+)", block).group(1)
    pytest.importorskip(library)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    latest = runs["ours"] / "checkpoints" / "step_000024"
    code = block.replace("RUN/checkpoints/latest", str(latest)).replace("RUN", str(runs["ours"]))
    exec(compile(code, library, "exec"), {})


def test_the_check_value_in_the_text_is_the_planners():
    best = power_law_optimum(5.28, 0.1, 0.2)
    assert f"x* = {best.x:.3f}, y* = {best.y:.3f}" in PLANNING
