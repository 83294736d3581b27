"""Problems of reasoning-gym (https://github.com/open-thought/reasoning-gym), which makes them by
procedure, offline: more than a hundred families.

Item i of a family is made with its seed + i, so that neighbouring seeds share nearly all problems.
Here a seed has a block of items of its own, and a question is either held out or trained on, in
every run and with all settings: its digest decides.
"""

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any
from zlib import crc32

from grpo_replay.errors import DatasetError, did_you_mean
from grpo_replay.prompts.sources import ProblemRows
from grpo_replay.recipe.input_sections import GYM, DatasetOptions
from grpo_replay.recipe.layers import shown
from grpo_replay.rewards.gym import open_family, points

SIZE = 1000
"""Default number of training problems (`size`)."""
HELD_OUT_SIZE = 200
BLOCK = 1_000_000
"""Number of items reserved for a seed, of which only the first ones are made."""
ONE_HELD_OUT_OF = 5
"""One question of this many is held out."""
MOST_TRIES = 8
"""Most items made per requested problem of a part."""
TRIED_GOLDS = 20
"""Number of problems whose own answer is scored before a family is used."""


def gym_rows(source: str, options: DatasetOptions, seed: int | None) -> ProblemRows:
    """The training problems of `reasoning_gym:NAME` for a seed; without a seed the held-out ones,
    which are the same in every run. A row has `problem`, `answer`, `problem_id`, and what the
    scorer needs.

    Raises DatasetError for a family or settings that do not exist, for a family whose own answers
    do not get full marks, and if it has fewer different questions than are wanted.
    """
    family, settings, size = source.removeprefix(GYM), *_settings(options)
    size = size if seed is not None else HELD_OUT_SIZE
    items = islice(_distinct_items(source, family, settings, size, seed), size)
    rows = [_row(source, family, settings, *item) for item in items]
    if len(rows) < size:
        part, key = (
            ("held-out", "eval.benchmarks") if seed is None else ("training", "prompts.source")
        )
        smaller = "" if seed is None else "prompts.dataset_options.size, or "
        raise DatasetError(
            f"{key} {source}: only {len(rows)} different {part} questions were found, {size} are "
            f"needed: set {smaller}settings of the family with more variety"
        )
    for row in rows[:TRIED_GOLDS]:
        _refuse_bad_gold(source, row)
    return ProblemRows(rows, source)


def lenient_scorer_notice(source: str, rows: ProblemRows) -> list[str]:
    """A notice if the family's scorer gives points for an answer without meaning."""
    row = rows.row(0)
    score = points(row["family"], row["settings"], "?", row["entry"])
    if not score:
        return []
    return [f"{source}: its scorer gives {score:g} points for the answer '?'"]


def _settings(options: DatasetOptions) -> tuple[str, int]:
    """The family's own settings as JSON, and the number of training problems."""
    given = dict(options.others)
    size = given.pop("size", SIZE)
    if not isinstance(size, int) or not 0 < size <= BLOCK // ONE_HELD_OUT_OF:
        raise DatasetError(
            f"prompts.dataset_options.size {shown(size)}: a number of problems from 1 to "
            f"{BLOCK // ONE_HELD_OUT_OF}"
        )
    if "seed" in given:
        raise DatasetError("prompts.dataset_options.seed: run.seed decides; remove it")
    return json.dumps(given), size


def _distinct_items(
    source: str, family: str, settings: str, size: int, seed: int | None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield number and entry of the items of one part, each question once."""
    first = 0 if seed is None else (seed + 1) * BLOCK
    share = 1 if seed is None else ONE_HELD_OUT_OF - 1
    tries = MOST_TRIES * size * ONE_HELD_OUT_OF // share
    made = _opened(source, family, settings, first, tries)
    asked = set[str]()
    for index in range(min(tries, BLOCK)):
        try:
            entry = made[index]
        except Exception as error:  # of a family that cannot make what its settings ask for
            raise DatasetError(
                f"prompts.source {source}, item {index} with {settings}: "
                f"{type(error).__name__}: {error}; choose other prompts.dataset_options"
            ) from error
        question = entry["question"]
        is_held_out = crc32(question.encode()) % ONE_HELD_OUT_OF == 0
        if is_held_out == (seed is None) and question not in asked:
            asked.add(question)
            yield first + index, entry


def _opened(source: str, family: str, settings: str, seed: int, size: int) -> Any:
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise DatasetError(
            f"prompts.source {source}: reasoning-gym is not installed here: pip install "
            "'grpo-replay[gym]'"
        ) from None
    if family not in DATASETS:
        raise DatasetError(
            f"prompts.source {source}: no such family{did_you_mean(family, DATASETS)}; there are: "
            f"{', '.join(sorted(DATASETS))}"
        )
    try:
        return open_family(family, settings, seed=seed, size=size)
    except (TypeError, ValueError, AssertionError) as error:
        raise DatasetError(
            f"prompts.dataset_options {settings} of {source}: {type(error).__name__}: {error}; "
            f"they are the fields of reasoning_gym's {DATASETS[family][1].__name__}, and size"
        ) from error


def _row(
    source: str, family: str, settings: str, number: int, entry: dict[str, Any]
) -> dict[str, Any]:
    if not isinstance(entry["answer"], str) or not entry["answer"].strip():
        raise DatasetError(
            f"prompts.source {source}: its problems have no reference answer, for example item "
            f"{number}: {shown(entry['question'])}; choose another family"
        )
    try:  # as the scorer gets it, in another process
        sent = json.loads(json.dumps(entry))
    except (TypeError, ValueError) as error:
        raise DatasetError(
            f"prompts.source {source}: item {number} cannot be sent to its scorer: {error}; "
            "choose another family"
        ) from error
    return {
        "problem": entry["question"],
        "answer": entry["answer"],
        "problem_id": str(number),
        "family": family,
        "settings": settings,
        "entry": sent,
    }


def _refuse_bad_gold(source: str, row: dict[str, Any]) -> None:
    score = points(row["family"], row["settings"], row["answer"], row["entry"])
    if score < 1:
        raise DatasetError(
            f"prompts.source {source}: its scorer gives its own answer {shown(row['answer'])} to "
            f"item {row['problem_id']} only {score:g} points of 1; choose another family"
        )
