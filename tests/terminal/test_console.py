"""Texts of the user and of a run reach the terminal as text: no markup, no escape sequence."""

import io
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from grpo_replay.cli.train_command import RunDisplay, result_table
from grpo_replay.terminal.console import PlainConsole, open_console, printable, tracked

RED = "\x1b[31mred\x1b[0m"


def shown(renderable, **options) -> str:
    console = PlainConsole(file=io.StringIO(), width=60, highlight=False, **options)
    console.print(renderable)
    return console.file.getvalue()


def cell(text: str) -> Table:
    table = Table()
    table.add_column(text)
    table.add_row(text)
    return table


@pytest.mark.parametrize("make", [str, Text, cell])
def test_escape_sequences_are_shown_and_not_sent(make):
    sent = shown(make(RED))
    assert "\x1b" not in sent
    assert "␛[31mred␛[" in sent


def test_the_consoles_own_styles_are_sent():
    sent = shown(f"[bold]fits[/bold] {escape(RED)}", force_terminal=True, color_system="standard")
    assert sent.startswith("\x1b[1mfits\x1b[0m")
    assert "␛[31mred" in sent


def test_what_cannot_be_printed_is_replaced_and_lines_stay():
    assert printable("a\tb\nc\x07\x9b\udcff\u202e\x7f") == "a\tb\nc␇���␡"


@pytest.mark.parametrize("name", ["exp[/a]", "[bold]", "[red]x", "\\[", "exp\x1b[2J"])
@pytest.mark.parametrize("terminal", [True, False])
def test_a_run_directory_of_any_name_is_shown_as_it_is(name, terminal, capsys):
    console = PlainConsole(
        file=io.StringIO(), width=100, markup=False, highlight=False, force_terminal=terminal
    )
    with RunDisplay(console) as display:
        display.on_status(f"loading {name}")
        display.on_notice(f"run directory {name}")
        console.print(display._screen())
    assert f"note: run directory {printable(name)}" in console.file.getvalue()
    assert "\x1b[2J" not in console.file.getvalue()


@pytest.mark.parametrize(
    ("error", "shown"),
    [(0.021, "0.0 ± 2.1 %, greedy 0.0 %"), (0.0, "0.0 % [0.0, 33.6] at 95 %, greedy 0.0 %")],
)
def test_an_accuracy_whose_problems_are_all_wrong_has_its_interval(error, shown):
    console = PlainConsole(file=io.StringIO(), width=80, force_terminal=False)
    report = SimpleNamespace(
        accuracies=lambda: {"mean": 0.0}, standard_errors=lambda: {"mean": error},
        greedy_accuracies=lambda: {"mean": 0.0}, missing_verdicts=lambda: None,
        sampled=SimpleNamespace(mean=SimpleNamespace(avg_at_k_interval=(0.0, 0.336))),
    )  # fmt: skip
    RunDisplay(console).on_evaluation(0, report)
    assert console.file.getvalue() == f"step 0: held-out accuracy {shown}\n"
    named = {f"{name}_{each}": {} for name in ("base", "final") for each in ("stderr", "greedy")}
    summary = named | {"base": {"mean": 0.0}, "final": {"mean": 0.5}}
    summary["base_stderr"] = {"mean": error}
    assert list(result_table(summary).columns[1].cells) == ["0.0" + " ± 2.1" * bool(error)]


def test_the_progress_of_a_run_is_complete_in_80_columns():
    console = PlainConsole(file=io.StringIO(), width=80, force_terminal=False)
    display = RunDisplay(console)
    step = {
        **{"step": 238, "reward": 0.34, "fresh/rollouts": 96, "replay/rollouts": 96},
        **{"replay/age_mean": 2.3, "cost/generated_tokens": 2_677, "step_time": 1.0},
        "reward/missing_fraction": 0.0,
    }
    display._held_out = 0.361
    display.on_step(step)
    console.print(display._screen())
    shown = console.file.getvalue()
    assert "reward +0.34 · held-out 36.1 % · fresh 96 replayed 96 · age 2.3 · 2,677 tok/s" in shown
    assert "…" not in shown and "━" in shown
    nothing = {**step, "fresh/rollouts": 0, "replay/rollouts": 0, "replay/age_mean": None}
    assert "fresh 0 replayed 0 (no group with signal) · " in display._describe_step(nothing)
    assert "no group" not in display._describe_step({**nothing, "reward": None})
    asynchronous = {
        **{"async/trainer_idle": 0.25, "async/sampler_idle": None, "async/age_mean": 1.5},
        **{"buffer/rollouts": 1_200, "cost/trained_tokens": 5_000},
    }
    assert display._describe_step({**step, **asynchronous}).endswith(
        " · trainer idle 25 % · sampler idle - · trained age 1.5 · stored 1,200 · "
        "5,000 tok/s trained · 2,677 tok/s generated"
    )


def test_results_are_printed_without_markup_unless_asked_for(capsys):
    open_console().print(f"runs/{Path('exp[/a]')} [bold]")
    open_console(markup=True).print(f"{escape('exp[/a]')} [bold]x[/bold]")
    assert capsys.readouterr().out == "runs/exp[/a] [bold]\nexp[/a] x\n"


@pytest.mark.parametrize("markup", [True, False])
def test_a_text_between_colons_is_not_an_emoji(markup, capsys):
    console = open_console(markup=markup)
    console.print("ratio 3:x:5 :smile:")
    console.print(cell("3:x:5"))
    assert "ratio 3:x:5 :smile:" in (shown := capsys.readouterr().out)
    assert shown.count("3:x:5") == 3


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_name_in_brackets_is_no_markup(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("grpo_replay.terminal.console.DELAY_SECONDS", -1.0)
    monkeypatch.setattr(sys, "stderr", Terminal())
    list(tracked([1, 2], "reading arm [x] :x:"))
    assert "reading arm [x] :x:" in sys.stderr.getvalue()
