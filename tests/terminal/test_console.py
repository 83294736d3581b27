"""Texts of the user and of a run reach the terminal as text: no markup, no escape sequence."""

import io
from types import SimpleNamespace

import pytest
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from grpo_replay.cli.run_display import RunDisplay
from grpo_replay.terminal.console import PlainConsole, open_console, printable

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


@pytest.mark.parametrize(("name", "terminal"), [("exp[/a]", True), ("exp\x1b[2J", False)])
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


def test_the_progress_of_a_run_has_the_mean_reward_and_the_step_that_was_evaluated():
    """The reward of a single step jumps; the mean is of the last 20. Complete in 80 columns."""
    console = PlainConsole(file=io.StringIO(), width=80, force_terminal=False)
    display = RunDisplay(console)
    step = {
        **{"fresh/rollouts": 96, "replay/rollouts": 96, "reward/missing_fraction": 0.0},
        **{"replay/age_mean": 2.3, "cost/generated_tokens": 2_677, "step_time": 1.0},
    }
    mean = {"mean": 0.361}
    evaluated = SimpleNamespace(
        accuracies=lambda: mean, standard_errors=lambda: mean, greedy_accuracies=lambda: None,
        missing_verdicts=lambda: None,
        sampled=SimpleNamespace(mean=SimpleNamespace(avg_at_k_interval=(0.34, 0.38))),
    )  # fmt: skip
    display.on_evaluation(200, evaluated)
    for number, reward in enumerate([-9.0, *[0.5] * 19, None, 0.7], start=216):
        display.on_step({**step, "step": number, "reward": reward})
    console.print(display._screen())
    shown = " ".join(console.file.getvalue().split())
    for each in (
        "reward +0.51 over 20 steps", "held-out 36.1 % after step 200", "fresh 96", "replayed 96",
        "age 2.3", "2,677 tok/s",
    ):  # fmt: skip
        assert each in shown
    assert "…" not in shown


def test_a_text_between_colons_is_not_an_emoji(capsys):
    console = open_console(markup=True)
    console.print("ratio 3:x:5 :smile:")
    assert "ratio 3:x:5 :smile:" in capsys.readouterr().out
