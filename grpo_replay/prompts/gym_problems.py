"""Makes problems of reasoning-gym (https://github.com/open-thought/reasoning-gym), which generates
them offline, in more than a hundred families.

reasoning-gym makes item i of a family from its seed + i, so that neighbouring seeds share nearly
all problems. Here every seed has a block of items of its own. A digest of the question decides
whether it is held out or trained on, in every run and with all settings.
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
HELD_OUT_EVERY = 5
"""One question in this many is held out."""
MAX_ITEMS_PER_PROBLEM = 8
"""Maximum number of items made per requested problem, to have enough that differ."""
CHECKED_ANSWERS = 20
"""Number of problems whose own answers are scored before a family is used."""


def gym_rows(source: str, options: DatasetOptions, seed: int | None) -> ProblemRows:
    """Make the training problems of `reasoning_gym:NAME` for a seed; without a seed the held-out
    ones, which are the same in every run. A row has `problem`, `answer`, `problem_id`, and for the
    scorer `family`, `settings` and `entry`.

    Raises DatasetError for a family or settings that do not exist, for a family whose own answers
    do not get full marks, and for fewer different questions than `dataset_options.size`.
    """
    family, settings, size = source.removeprefix(GYM), *_settings(options)
    size = size if seed is not None else HELD_OUT_SIZE
    items = islice(_distinct_items(source, family, settings, size, seed), size)
    rows = [_row(source, family, settings, *item) for item in items]
    if len(rows) < size:
        part, key, smaller_size = (
            ("held-out", "eval.benchmarks", "")
            if seed is None
            else ("training", "prompts.source", "a smaller prompts.dataset_options.size, or ")
        )
        raise DatasetError(
            f"{key} {source}: only {len(rows)} different {part} questions were found, {size} are "
            f"needed: set {smaller_size}settings of the family with more variety"
        )
    for row in rows[:CHECKED_ANSWERS]:
        _check_own_answer(source, row)
    return ProblemRows(rows, source)


def lenient_scorer_notice(source: str, rows: ProblemRows) -> list[str]:
    """Return a notice if the family's scorer gives points for the meaningless answer '?'."""
    row = rows.row(0)
    score = points(row["family"], row["settings"], "?", row["entry"])
    if not score:
        return []
    return [f"{source}: its scorer gives {score:g} points for the answer '?'"]


def _settings(options: DatasetOptions) -> tuple[str, int]:
    """Returns the family's own settings as JSON, and the number of training problems. Raises
    DatasetError for a bad `size`, and for a `seed`, which is the run's."""
    family_settings = dict(options.extra_settings)
    size = family_settings.pop("size", SIZE)
    if not isinstance(size, int) or not 0 < size <= BLOCK // HELD_OUT_EVERY:
        raise DatasetError(
            f"prompts.dataset_options.size {shown(size)}: set a number of problems from 1 to "
            f"{BLOCK // HELD_OUT_EVERY}"
        )
    if "seed" in family_settings:
        raise DatasetError("prompts.dataset_options.seed: run.seed decides; remove it")
    return json.dumps(family_settings), size


def _distinct_items(
    source: str, family: str, settings: str, size: int, seed: int | None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield number and entry of one part's items, training or held out, with distinct questions."""
    first = 0 if seed is None else (seed + 1) * BLOCK
    share = 1 if seed is None else HELD_OUT_EVERY - 1
    max_items = MAX_ITEMS_PER_PROBLEM * size * HELD_OUT_EVERY // share
    items = _open_family_items(source, family, settings, first, max_items)
    questions = set[str]()
    for index in range(min(max_items, BLOCK)):
        try:
            entry = items[index]
        except Exception as error:  # of a family that cannot make what its settings ask for
            raise DatasetError(
                f"prompts.source {source}, item {index} with {settings}: "
                f"{type(error).__name__}: {error}; choose other prompts.dataset_options"
            ) from error
        question = entry["question"]
        is_held_out = crc32(question.encode()) % HELD_OUT_EVERY == 0
        if is_held_out == (seed is None) and question not in questions:
            questions.add(question)
            yield first + index, entry


def _open_family_items(source: str, family: str, settings: str, seed: int, size: int) -> Any:
    """Opens a family's `size` items from `seed` on. Raises DatasetError if reasoning-gym is
    missing, or does not know the family or its settings."""
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
            f"set fields of reasoning_gym's {DATASETS[family][1].__name__}, and size"
        ) from error


def _row(
    source: str, family: str, settings: str, number: int, entry: dict[str, Any]
) -> dict[str, Any]:
    """Makes the row of item `number`. Raises DatasetError if it has no reference answer in text, or
    cannot be sent to its scorer as JSON."""
    if not isinstance(entry["answer"], str) or not entry["answer"].strip():
        raise DatasetError(
            f"prompts.source {source}: its problems have no reference answer, for example item "
            f"{number}: {shown(entry['question'])}; choose another family"
        )
    try:  # the scorer, in another process, gets the entry as JSON
        json_entry = json.loads(json.dumps(entry))
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
        "entry": json_entry,
    }


def _check_own_answer(source: str, row: dict[str, Any]) -> None:
    score = points(row["family"], row["settings"], row["answer"], row["entry"])
    if score < 1:
        raise DatasetError(
            f"prompts.source {source}: its scorer gives its own answer {shown(row['answer'])} to "
            f"item {row['problem_id']} only {score:g} points of 1; choose another family"
        )
