"""A working folder in which files have the names of modules that Python and libraries import."""

from pathlib import Path

NAMES = ("types", "secrets", "random", "datasets")


def write_shadowing_files(folder: Path, *left_out: str) -> Path:
    """The folder, with files that fail when they are imported."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        if name not in left_out:
            (folder / f"{name}.py").write_text("raise RuntimeError('that of the working folder')\n")
    return folder
