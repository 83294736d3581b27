"""Write docs/recipe.md and docs/cli.md from schema and commands.

    python docs/make_reference.py
    python docs/make_reference.py --run-notebook     # and run docs/guide.ipynb: some minutes

A test fails when the files are not what this writes, and when the notebook has not the code of
docs/index.md.
"""

import inspect
import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

from typer.models import ArgumentInfo

from grpo_replay.cli.app import app
from grpo_replay.recipe import REPLAY_PRESETS, Recipe, Section
from grpo_replay.recipe.base import Passthrough

DOCS = Path(__file__).resolve().parent
NOTEBOOK = DOCS / "guide.ipynb"
CHECKED = "\nif _exit_code: raise RuntimeError(_exit_code)"


def recipe_reference() -> str:
    """Markdown: every key with default, allowed values and meaning."""
    lines = [
        "# Recipe reference",
        "",
        "Generated from the sections in `grpo_replay/recipe/` by `docs/make_reference.py`.",
        "",
        "A recipe is a YAML file; `--set section.key=value` overrides any key. Precedence:",
        "defaults < file < `--set`. Unknown keys are refused. A run saves the resolved recipe.",
        "Each key is shown with its default.",
        "",
        "Values are YAML 1.2: `010` is 10, `1e3` a number, `on` and `1:30` are text; a key is",
        "written once. After `--set`, all that follows `=` is the text of a text key, unless it is",
        "empty, `null`, `~` or in quotes. In a file, quote text that YAML reads as something else:",
        "`revision: '1e3'`, `answer_field: '####'`.",
        "",
        "A replay preset sets these keys. The same or a higher layer can override it, and it first",
        "resets what presets of lower layers set. `grpo` resets nothing: it only switches replay",
        "off, as the baseline of that recipe.",
        "",
        "| preset | sets |",
        "|---|---|",
    ]
    for name, values in REPLAY_PRESETS.items():
        decided = ", ".join(f"`{key}: {json.dumps(value)}`" for key, value in values.items())
        lines.append(f"| `{name}` | {decided} |")
    for name, field in Recipe.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            lines += ["", *_section(name, field.annotation)]
    return "\n".join(lines) + "\n"


def _section(path: str, section: type[Section]) -> list[str]:
    properties = section.model_json_schema().get("properties", {})
    lines = [f"## {path}", ""]
    if issubclass(section, Passthrough):
        defaults = section().model_dump().items()
        known = ", ".join(f"`{k}: {json.dumps(v)}`" for k, v in defaults)
        return [*lines, " ".join((section.__doc__ or "").split()), f"Defaults: {known}."]
    lines += ["| key | meaning |", "|---|---|"]
    nested = []
    for key, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            nested += ["", *_section(f"{path}.{key}", field.annotation)]
            continue
        default = json.dumps(field.get_default(call_default_factory=True), ensure_ascii=False)
        meaning = _meaning(_allowed(properties[key]), " ".join((field.description or "").split()))
        lines.append(f"| {_cell(f'`{key}: {default}`')} | {_cell(meaning)} |")
    return lines + nested


def _meaning(allowed: str, text: str) -> str:
    """The description, after the allowed values if they are more than a type and not all in it."""
    allowed = allowed.removesuffix(" or null")
    bare = {"true, false", "text", "mapping", "integer", "number"}
    if bare.issuperset(allowed.split(" or ")) or all(each in text for each in allowed.split(", ")):
        return text
    return f"{allowed[0].upper()}{allowed[1:]}. {text}"


def _allowed(schema: dict[str, Any]) -> str:
    """What a JSON schema allows, in words."""
    if "anyOf" in schema:
        return " or ".join(_allowed(option) for option in schema["anyOf"])
    if "$ref" in schema:
        return "mapping"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if schema.get("type") == "array":
        return f"list of {_allowed(schema.get('items', {}))}"
    names = {"integer": "integer", "number": "number", "string": "text", "boolean": "true, false",
             "null": "null", "object": "mapping"}  # fmt: skip
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {schema[key]:g}" for key, sign in signs.items() if key in schema]
    return " ".join([names.get(schema.get("type", ""), "any"), ", ".join(bounds)]).strip()


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def cli_reference() -> str:
    """Markdown: every command with its arguments and options, and the exit codes."""
    lines = [
        "# Command line",
        "",
        "Generated from `grpo_replay/cli/options.py` by `docs/make_reference.py`.",
        "",
        "Results go to stdout, progress and notices to stderr.",
        "",
        "| exit code | meaning |",
        "|---|---|",
        "| 0 | done |",
        "| 1 | unexpected: a bug; the traceback is in the run's log |",
        "| 2 | usage, or a value or combination in the recipe |",
        "| 3 | missing or bad data, snapshot or checkpoint, an occupied output directory |",
        "| 4 | stopped for safety: non-finite loss, log-prob gap, a lost sampler or rank, "
        "a failing reward function |",
        "| 130 | interrupted: after a checkpoint, or at a second Ctrl-C at once |",
    ]
    commands = {each.name or each.callback.__name__: each.callback
                for each in app.registered_commands}  # fmt: skip
    options = {name: _options(command) for name, command in commands.items()}
    counts = Counter(each for rows in options.values() for each in rows)
    shared = [each for each, count in counts.items() if count > 1]
    lines += ["", "| option of several commands | |", "|---|---|", *shared]
    for name, command in commands.items():
        meaning = " ".join((command.__doc__ or "").split())
        lines += ["", f"## grpo-replay {name}", "", meaning, "", "| | |", "|---|---|"]
        lines += [each for each in options[name] if each not in shared]
        also = [f"`{each.split('`')[1].split()[0]}`" for each in options[name] if each in shared]
        lines += ["", f"Also {', '.join(also)}."] if also else []
    return "\n".join(lines) + "\n"


def _options(command: Callable[..., Any]) -> list[str]:
    """A row of a table for each argument and option of a command."""
    hints = get_type_hints(command, include_extras=True)
    rows = []
    for parameter in inspect.signature(command).parameters.values():
        kind, info = get_args(hints[parameter.name])
        rows.append(f"| {_cell(_usage(parameter, kind, info))} | {_cell(info.help or '')} |")
    return rows


def _usage(parameter: inspect.Parameter, kind: Any, info: Any) -> str:
    """How an argument or option is written, and its default if it has a telling one."""
    if isinstance(info, ArgumentInfo):
        return f"`{info.metavar or parameter.name.upper()}`"
    # Inside Annotated, Typer keeps the first declared name in `default`.
    declared = info.default if isinstance(info.default, str) else None
    word = declared or "--" + parameter.name.replace("_", "-")
    types = [each.__name__ for each in (kind, *get_args(kind)) if each in (int, float, str)]
    value = "" if bool in (kind, *get_args(kind)) else f" {info.metavar or types[0].upper()}"
    telling = parameter.default not in (None, False, "", ..., parameter.empty)
    return f"`{word}{value}`" + (f" (default {parameter.default})" if telling else "")


def _notebook_text(cells: list[dict[str, Any]]) -> str:
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4}
    return json.dumps(notebook | {"nbformat_minor": 5}, indent=1, ensure_ascii=False) + "\n"


def run_notebook() -> None:
    """Run every cell of docs/guide.ipynb in an empty folder and keep the outputs. Raises
    CellExecutionError for a command that fails."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    os.environ |= {"TTY_COMPATIBLE": "0", "COLUMNS": "100", "NO_COLOR": "1"}
    sources = [cell.source for cell in notebook.cells]
    for cell in notebook.cells:
        if cell.source.startswith("!"):  # a failed command is no error of its cell
            cell.source = re.sub(r"$", CHECKED, cell.source, flags=re.MULTILINE)
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(notebook, timeout=3000, resources={"metadata": {"path": folder}})
        client.execute()
    for cell, source in zip(notebook.cells, sources, strict=True):
        cell.source = source
        if cell.cell_type == "code":
            cell.metadata = {}
            cell.outputs = _joined(cell.outputs, (f"{folder}/", f"{tempfile.gettempdir()}/"))
    NOTEBOOK.write_text(_notebook_text(notebook.cells), encoding="utf-8")


def _joined(outputs: list[dict[str, Any]], places: tuple[str, ...]) -> list[dict[str, Any]]:
    """Pieces of one stream as one text, with the line ends of a file and without `places`."""
    joined: list[dict[str, Any]] = []
    for output in outputs:
        if output["output_type"] != "stream":
            joined.append(output)
            continue
        text = output["text"].replace("\r\n", "\n")
        for place in places:
            text = text.replace(place, "")
        if joined and joined[-1].get("name") == output["name"]:
            joined[-1]["text"] += text
        else:
            joined.append({**output, "text": text})
    return joined


def main() -> None:
    (DOCS / "recipe.md").write_text(recipe_reference(), encoding="utf-8")
    (DOCS / "cli.md").write_text(cli_reference(), encoding="utf-8")
    if "--run-notebook" in sys.argv[1:]:
        run_notebook()


if __name__ == "__main__":
    main()
