"""The page of a buffer: its rollouts against the rows of the files, its sample, its text."""

import base64
import hashlib
import html
import json
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import by_hand
import pytest
from commands import run_inspect as run
from slow_tests import slow_except
from small_runs.synthetic import SyntheticRun, synthetic_recipe, write_synthetic_run
from tokenizers import Tokenizer, decoders, models

import grpo_replay
from grpo_replay.lab.inspection import rollout_sample, shown_rollouts
from grpo_replay.lab.inspection.buffer_page import script_data
from grpo_replay.lab.inspection.compute import read_records
from grpo_replay.lab.inspection.shown_rollouts import ShownRollouts
from grpo_replay.lab.inspection.source import open_source
from grpo_replay.lab.inspection.token_text import Decoder, open_decoder
from grpo_replay.lab.inspection.views import read_life

TOKENIZER = Path(grpo_replay.__file__).parent / "tiny" / "base" / "tokenizer.json"
FATES = {"still": "stored", "evicted": "evicted", "never": "dropped"}


def shown(path: Path) -> ShownRollouts:
    source = open_source(path)
    return shown_rollouts.shown_rollouts(source, read_records(source))


@pytest.mark.parametrize("preset", slow_except(["ours"], ["ours", "fifo"]))
def test_every_rollout_of_a_small_run_has_the_life_that_the_files_say(runs, preset):
    found, source = shown(runs[preset]), open_source(runs[preset])
    rows = by_hand.rows_of(runs[preset] / "rollouts")
    assert [each.id for each in found.rollouts] == [row["rollout_id"] for row in rows]
    assert found.note == f"All {len(rows)} rollouts."
    used = max(found.rollouts, key=lambda each: each.draws)
    assert used.draws > 1
    for each in (*found.rollouts[::40], used):
        life = read_life(source, each.id)
        assert [use.step for use in each.uses] == [use["step"] for use in life.uses]
        assert [use.age for use in each.uses] == [use["age_steps"] for use in life.uses]
        for name, column, unit in (("probability", "probability", 1), ("kl", "approx_kl", 1),
                                   ("clipped", "clip_fraction", 100)):  # fmt: skip
            logged = [use[column] for use in life.uses]
            shown_values = [getattr(use, name) for use in each.uses]
            assert [value is None for value in shown_values] == [value is None for value in logged]
            assert [value for value in shown_values if value is not None] == pytest.approx(
                [unit * value for value in logged if value is not None], rel=1e-4
            )
        group = [(each.id, each.reward, each.verdict) for each in found.groups[each.group]]
        assert group == [(m["rollout_id"], m["reward"], m["verdict"]) for m in life.group]
        assert each.fate == FATES[life.fate.split()[0]]
        assert each.text == life.rollout["completion_text"]
        assert each.token_ids == life.rollout["completion_token_ids"]


def test_a_snapshot_alone_has_its_rollouts_and_the_number_of_their_draws(runs, tmp_path):
    shutil.copy(runs["ours"] / "checkpoints/step_000024/buffer.parquet", tmp_path)
    found = shown(tmp_path / "buffer.parquet")
    stored = {row["rollout_id"]: row for row in by_hand.stored_rows(runs["ours"], 24)}
    assert {each.id: each.draws for each in found.rollouts} == {
        number: row["times_used"] for number, row in stored.items()
    }
    assert not found.has_uses and all(each.text is None for each in found.rollouts)
    assert found.reason.startswith("no tokenizer.json in ") and "checkpoint-*" in found.reason
    first = found.rollouts[0]
    assert first.token_ids == stored[first.id]["completion_token_ids"]
    assert found.prompts == ["token ids [0, 1, 2, 3, 4]"]


def test_a_sample_has_the_extremes_and_whole_groups_of_the_whole_run(runs, monkeypatch):
    monkeypatch.setattr(rollout_sample, "MOST_ROLLOUTS", 200)
    found = shown(runs["ours"])
    rows = by_hand.rows_of(runs["ours"] / "rollouts")
    draws = by_hand.rows_of(runs["ours"] / "draws")
    ids = {each.id for each in found.rollouts}
    assert 180 <= len(ids) <= 200 < len(rows)
    assert found.note.startswith(f"{len(ids)} of {len(rows)} rollouts: the 10 most extreme")
    times = Counter(row["rollout_id"] for row in draws)
    clipped: dict[int, float] = {}
    for row in draws:
        clipped[row["rollout_id"]] = max(row["clip_fraction"], clipped.get(row["rollout_id"], 0))
    magnitude = {row["rollout_id"]: abs(row["advantage"] or 0) for row in rows}
    oldest: dict[int, float] = {}
    for row in draws:
        oldest[row["rollout_id"]] = max(row["age_steps"], oldest.get(row["rollout_id"], 0))
    for values in (times, clipped, magnitude, oldest):
        tenth = sorted(values.values())[-10]
        assert {number for number, value in values.items() if value > tenth} <= ids
        assert sum(values.get(number, 0) >= tenth for number in ids) >= 10
    steps = {each.step for each in found.rollouts if each.why is None}
    assert min(steps) <= 2 and max(steps) >= 23
    whole = [group for group in found.groups.values() if {each.id for each in group} <= ids]
    assert len(whole) >= 25


def test_long_completions_make_the_sample_smaller_but_not_empty(runs, monkeypatch):
    monkeypatch.setattr(rollout_sample, "MOST_TOKENS", 6000)
    mean = sum(len(r["completion_token_ids"]) for r in by_hand.rows_of(runs["ours"] / "rollouts"))
    limit = int(6000 / (mean / 768))
    assert 100 < limit < 768
    assert 0.9 * limit <= len(shown(runs["ours"]).rollouts) <= limit
    monkeypatch.setattr(rollout_sample, "MOST_TOKENS", 1)
    assert 90 <= len(shown(runs["ours"]).rollouts) <= rollout_sample.FEWEST_ROLLOUTS


def test_a_text_longer_than_its_share_of_the_page_is_cut_and_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(shown_rollouts, "PAGE_CHARACTERS", 32 * 2500)
    writer = SyntheticRun(tmp_path, synthetic_recipe("ours"))
    group = writer.group
    writer.group = lambda *given: [replace(r, completion_text="x" * 3000) for r in group(*given)]
    writer.write(1)
    found = shown(tmp_path).rollouts
    assert len(found) == 32
    assert all((each.text, each.text_cut) == ("x" * 2500, 500) for each in found)


@pytest.mark.parametrize(
    "folder",
    ["checkpoints/step_000006/model", "checkpoint-40", "global_step_3/actor/huggingface", "."],
)
def test_tokens_have_the_text_of_the_tokenizer_of_a_checkpoint_of_any_trainer(tmp_path, folder):
    write_synthetic_run(tmp_path, steps=6)
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    shutil.copy(TOKENIZER, tmp_path / folder)
    found, tokenizer = shown(tmp_path), Tokenizer.from_file(str(TOKENIZER))
    assert found.reason == "" and found.special == [0, 1, 2]
    assert found.prompts == [tokenizer.decode([0, 1, 2, 3, 4], skip_special_tokens=False)]
    for each in found.rollouts:
        text = tokenizer.decode(each.token_ids, skip_special_tokens=False)
        assert "".join(found.pieces[token] for token in each.token_ids) == text
        assert each.logprobs is not None and len(each.logprobs) == len(each.token_ids)


def test_the_newest_of_several_tokenizers_is_taken(tmp_path):
    for step, word in ((9, "old"), (10, "new")):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        Tokenizer(models.WordLevel({word: 0}, unk_token=word)).save(str(folder / "tokenizer.json"))
    assert open_decoder(tmp_path).text([0]) == "new"


def test_a_piece_keeps_the_blank_that_a_first_token_loses():
    words = Tokenizer(models.WordLevel({"▁a": 0, "b": 1, "<0xE2>": 2}, unk_token="b"))
    words.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    assert words.decode([0, 1, 0]) == "ab a"
    assert Decoder(words).pieces([1, 0, 1, 2]) == {0: " a", 1: "b", 2: "�"}


def test_without_tokenizers_the_page_and_a_life_say_what_to_install(
    runs, tmp_path, monkeypatch, capsys
):
    folder = tmp_path / "run"
    shutil.copytree(runs["ours"], folder)
    shutil.copy(TOKENIZER, folder)
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    assert shown(folder).reason == "tokenizers is not installed: pip install tokenizers"
    run(str(folder), show=300)
    assert "pip install tokenizers; token ids [0, 1, 2, 3, 4]" in capsys.readouterr().out


def page_of(folder: Path, page: Path) -> str:
    run(str(folder), plot=str(page))
    return page.read_text(encoding="utf-8")


def test_the_page_has_six_figures_every_table_and_runs_its_own_script_alone(runs, tmp_path):
    page = page_of(runs["ours"], tmp_path / "page.html")
    assert page.count("<figure>") == page.count("<figcaption>") == 6
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids)) > 50
    for title in ("occupancy", "populations", "outcomes by age at use", "over training"):
        assert f"<h3>{title}" in page
    assert re.findall(r'\b(?:src|href)="(?!#|data:)', page) == []
    assert re.findall(r"<script[^>]*>", page) == [
        '<script type="application/json" id="data">',
        "<script>",
    ]
    script = page.rpartition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)
    assert policy and "default-src 'none'" in policy[1]
    assert f"script-src 'sha256-{digest}'" in html.unescape(policy[1])
    assert len(script.splitlines()) <= 151  # with the line break after the tag


@pytest.mark.parametrize("preset", slow_except(["grpo", "fifo"], ["grpo", "fifo", "group_std"]))
def test_the_page_has_only_figures_with_data(runs, preset, tmp_path):
    page = page_of(runs[preset], tmp_path / "page.html")
    assert page.count("<figure>") == (1 if preset == "grpo" else 6)
    assert ("<h3>occupancy" in page) == (preset != "grpo")


def test_no_text_ends_the_script_element_that_it_is_in():
    hostile = "</script><script>alert(1)</script><!--\u2028\ud800"
    text = script_data({"text": hostile})
    assert "<" not in text and text.isascii()
    assert json.loads(text) == {"text": hostile}


def test_names_of_a_run_are_escaped(tmp_path):
    made = write_synthetic_run(tmp_path / "<script>alert(1)<" / "script>", "ours", steps=6)
    page = page_of(made.folder, tmp_path / "page.html")
    assert "<script>alert" not in page and "&lt;script&gt;alert(1)&lt;" in page
