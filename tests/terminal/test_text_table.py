"""One table, in the terminal, Markdown and a page."""

from io import StringIO

from jinja2 import Environment, PackageLoader
from rich.console import Console

from grpo_replay.terminal.text_table import TextTable

TABLE = TextTable(
    header=("task", "[a|b]", "95 %"),
    rows=[("<x>", "1.5", "12\n[3, 4]"), ("a long name of a task", "22.25", "–")],
    title="[bold]accuracy",
    legend="in %",
    totals=[("mean", "11.9", "–")],
)


def printed(width: int) -> list[str]:
    console = Console(width=width, file=StringIO())
    TABLE.print(console)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def test_the_terminal_shows_every_text_as_it_is_the_totals_apart_and_the_legend():
    lines = printed(80)
    assert [line for line in lines if line.strip("─ ")] == [
        "[bold]accuracy", "task [a|b] 95 %", "<x> 1.5 12", "[3, 4]",
        "a long name of a task 22.25 –", "mean 11.9 –", "in %",
    ]  # fmt: skip
    assert not lines[lines.index("mean 11.9 –") - 1]


def test_on_a_narrow_terminal_names_are_folded_and_numbers_are_not():
    lines = " ".join(printed(10))
    assert all(number in lines for number in ("1.5", "[3, 4]", "22.25", "11.9"))
    assert "a long name of a task" not in lines


def test_markdown_has_a_line_for_each_row_whatever_its_cells_hold():
    assert TABLE.markdown() == [
        "| task | [a\\|b] | 95 % |",
        "| --- | ---: | ---: |",
        "| <x> | 1.5 | 12 [3, 4] |",
        "| a long name of a task | 22.25 | – |",
        "| mean | 11.9 | – |",
    ]


def test_a_page_has_every_cell_escaped_and_no_empty_header_or_legend():
    pages = Environment(loader=PackageLoader("grpo_replay", "terminal"), autoescape=True)
    draw = pages.get_template("text_table.html").module.draw
    assert draw(TABLE).count("<td>") == 9 and "<td>&lt;x&gt;</td>" in draw(TABLE)
    bare = draw(TextTable((), [("stored", "3")]))
    assert "<thead>" not in bare and "<p" not in bare and bare.count("<td>") == 2
