"""The output files of an evaluation.

They are checked before anything is sampled, and only files of an earlier evaluation are replaced.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from grpo_replay.errors import EvaluationFileError, OutputDirectoryError, UsageError
from grpo_replay.evaluation.evaluation_report import EvaluationReport, read_report, samples_path
from grpo_replay.evaluation.evaluation_tables import PAGE_TITLE, markdown
from grpo_replay.evaluation.sample_table import check_samples_file
from grpo_replay.storage.atomic import named_if_unwritable, write_text_whole

_Read = TypeVar("_Read")


def page_path(report_path: Path) -> Path:
    """The path of a report's Markdown page."""
    return report_path.with_suffix(".md")


def generations_parent(report_path: Path) -> Path:
    """The folder that contains the cached generations of an evaluation."""
    return report_path.with_suffix(".generations")


def check_output(output: Path) -> EvaluationReport | None:
    """The evaluation that would be replaced, if there is one. Creates nothing.

    Raises UsageError unless the name ends in .json, and OutputDirectoryError if another kind of
    file would be replaced or the folder is not writable.
    """
    if output.suffix != ".json":
        raise UsageError(
            f"--output {output}: name a .json file; the per-sample rows (.parquet) and the page "
            "(.md) are written next to it"
        )
    with named_if_unwritable(output):
        earlier = _refuse_other_files(output)
        folder = next(each for each in output.absolute().parents if each.exists())
        tempfile.NamedTemporaryFile(dir=folder, prefix=output.name).close()
    generations = generations_parent(output)
    with named_if_unwritable(generations):
        if generations.exists():
            tempfile.NamedTemporaryFile(dir=generations).close()
    return earlier


def write_output(report: EvaluationReport, output: Path) -> None:
    """Write report, rows and page. Raises OutputDirectoryError."""
    report.write(output)
    with named_if_unwritable(page_path(output)):
        write_text_whole(page_path(output), markdown(report))


def _refuse_other_files(output: Path) -> EvaluationReport | None:
    earlier = None
    if output.exists():
        earlier = _require(output, _read_without_rows, "an evaluation file")
    if samples_path(output).exists():
        _require(samples_path(output), check_samples_file, "a per-sample file of this version")
    if page_path(output).exists():
        _require(page_path(output), _read_page, "the page of an evaluation")
    return earlier


def _require(path: Path, read: Callable[[Path], _Read], kind: str) -> _Read:
    try:
        return read(path)
    except EvaluationFileError as error:
        raise OutputDirectoryError(
            f"{path} would be replaced, but it is not {kind}: choose another name with --output, "
            f"or remove it ({error})"
        ) from error


def _read_without_rows(path: Path) -> EvaluationReport:
    # If an evaluation was killed, the rows next to it may belong to another one.
    return read_report(path, with_samples=False)


def _read_page(path: Path) -> None:
    try:
        is_page = path.read_text(encoding="utf-8").startswith(PAGE_TITLE)
    except (OSError, ValueError) as error:
        raise EvaluationFileError(f"{path} cannot be read: {error}") from error
    if not is_page:
        raise EvaluationFileError(f"it does not begin with {PAGE_TITLE!r}")
