"""The recipes and sweeps that ship with the package, by name.

Imports nothing heavy: `--help` and shell completion use it.
"""

from pathlib import Path


def shipped_recipes_folder() -> Path:
    """Returns the folder of the recipes that ship with the package (wheel or checkout)."""
    here = Path(__file__).resolve().parent
    inside = here / "recipes"
    return inside if inside.is_dir() else here.parent / "recipes"


def shipped_recipes() -> dict[str, Path]:
    """Returns the file of every shipped recipe, by name, in alphabetical order."""
    return _by_name(shipped_recipes_folder())


def shipped_sweeps() -> dict[str, Path]:
    """Returns the file of every shipped sweep, by name, in alphabetical order."""
    return _by_name(shipped_recipes_folder() / "sweeps")


def _by_name(folder: Path) -> dict[str, Path]:
    return {file.stem: file for file in sorted(folder.glob("*.yaml"), key=lambda file: file.stem)}
