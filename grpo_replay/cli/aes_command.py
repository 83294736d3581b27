"""`grpo-replay aes`: print the accuracy-efficiency score against one reference."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from grpo_replay.cli.options import AesOptions
from grpo_replay.errors import UsageError
from grpo_replay.evaluation.aes import AesScore, Point, point_of, score_points, score_reports
from grpo_replay.evaluation.evaluation_report import read_report
from grpo_replay.evaluation.evaluation_tables import interval, tokens
from grpo_replay.terminal.console import open_console, print_json
from grpo_replay.terminal.text_table import TextTable


def run(options: AesOptions) -> int:
    """Print AES of `files` or of `candidates` against `reference`.

    Raises UsageError if numbers and files are mixed.
    """
    if bool(options.files) == bool(options.candidates):
        raise UsageError(
            "aes scores either evaluation files, named without an option, or --candidate "
            "NAME=ACC,TOKENS: their accuracies may be in different units"
        )
    gain, loss, reference = options.gain, options.loss, options.reference
    if options.files:
        point, scores = _from_files(reference, options.files, gain, loss)
    else:
        point = Point("reference", *_numbers(reference, "--reference"))
        scores = score_points(point, [_candidate(word) for word in options.candidates], gain, loss)
    if options.as_json:
        print_json(document(point, scores, gain, loss))
        return 0
    print_scores(point, scores, gain, loss, open_console())
    return 0


def document(
    reference: Point, scores: Sequence[AesScore], gain: float, loss: float
) -> dict[str, Any]:
    """Make the JSON document of `aes --json`."""
    return {
        "reference": asdict(reference),
        "constants": {"gain": gain, "loss": loss},
        "candidates": [asdict(score) for score in scores],
    }


def print_scores(
    reference: Point, scores: Sequence[AesScore], gain: float, loss: float, console: Console
) -> None:
    """Print the scores, their intervals if there are any, and the constants."""
    header = ("model", "accuracy", "tokens", "ΔL", "ΔAcc", "AES")
    names = [reference.name, *(score.name for score in scores)]
    rows = [(names[0], f"{reference.accuracy:.4g}", tokens(reference.tokens), *"–––")]
    for name, score in zip(names[1:], scores, strict=True):
        deltas = (score.delta_length, score.delta_accuracy, score.aes)
        rows.append(
            (
                *(name, f"{score.accuracy:.4g}", tokens(score.tokens)),
                *(f"{delta:+.3f}" for delta in deltas),
            )
        )
    TextTable(header, rows, f"AES against {reference.name}").print(console)
    intervals = [
        (score.delta_length_interval, score.delta_accuracy_interval, score.aes_interval)
        for score in scores
    ]
    if any(map(any, intervals)):
        rows = [
            (name, *(interval(bounds, "{:+.3f}".format) for bounds in three))
            for name, three in zip(names[1:], intervals, strict=True)
        ]
        TextTable(("model", *header[3:]), rows, "95 % intervals over problems").print(console)
    console.print(f"AES = ΔL + β·ΔAcc, β = {gain:g} if ΔAcc ≥ 0, else {loss:g}")


def _from_files(
    reference: str, files: Sequence[str], gain: float, loss: float
) -> tuple[Point, list[AesScore]]:
    """Read evaluation files; returns the reference and the scores."""
    report = read_report(Path(reference))
    candidates = [(file, read_report(Path(file))) for file in files]
    scores = score_reports((reference, report), candidates, gain, loss)
    return point_of(reference, report), scores


def _candidate(word: str) -> Point:
    name, _, numbers = word.rpartition("=")
    if not name:
        raise UsageError(f"--candidate {word!r}: expected NAME=ACC,TOKENS, such as ours=31.06,6800")
    return Point(name, *_numbers(numbers, f"--candidate {name}"))


def _numbers(text: str, option: str) -> tuple[float, float]:
    """Reads ACC,TOKENS, an accuracy in % and a mean length. Raises UsageError."""
    try:
        accuracy, length = map(float, text.split(","))
    except ValueError as error:
        raise UsageError(f"{option} {text!r}: expected ACC,TOKENS, such as 26.71,7576") from error
    if not (0 <= accuracy <= 100 and 0 <= length < math.inf):
        raise UsageError(f"{option} {text!r}: expected an accuracy of 0 to 100 %, and tokens")
    return accuracy, length
