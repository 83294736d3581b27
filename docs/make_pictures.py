"""Make the pictures of the README.

    grpo-replay train tiny --output-dir runs/tiny
    grpo-replay sweep seeds.yaml --output-dir runs/seeds
    grpo-replay train smollm2 --set eval.every_steps=3 --output-dir runs/smollm2
    python docs/make_pictures.py --tiny runs/tiny --seeds runs/seeds --smollm2 runs/smollm2

seeds.yaml is

    recipe: tiny
    set: [run.steps=80, eval.every_steps=20, replay.max_age_steps=10, replay.warmup_steps=10]
    arms: {grpo: [replay.preset=grpo], ours: [replay.preset=ours]}
    seeds: [1, 2, 3]

The end of a run in the terminal, the top of the buffer's page in Chromium, figures of reports.
"""

import argparse
import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from rich._export_format import CONSOLE_SVG_FORMAT

from grpo_replay.api import report
from grpo_replay.cli.train_command import print_result
from grpo_replay.storage.recipe_history import read_recipe_file
from grpo_replay.terminal.console import PlainConsole

IMAGES = Path(__file__).resolve().parent / "images"
CHROMIUM = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--force-device-scale-factor=1"]  # fmt: skip


def end_of_training(run: Path) -> str:
    """What `train` prints at its end, as SVG that loads no font from elsewhere."""
    screen = {"record": True, "file": io.StringIO(), "force_terminal": True}
    console = PlainConsole(width=96, highlight=False, **screen)
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    print_result(run, summary, read_recipe_file(run / "recipe.yaml"), console)
    own_fonts = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    return console.export_svg(title="grpo-replay train tiny", code_format=own_fonts)


def screenshot_of_buffer(run: Path, picture: Path) -> None:
    """The first rows of the page of `inspect-buffer RUN --plot page.html`."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        inspect = [sys.executable, "-m", "grpo_replay", "inspect-buffer", str(run)]
        subprocess.run([*inspect, "--plot", str(page)], check=True)
        command = [*CHROMIUM, "--window-size=1270,760", f"--user-data-dir={folder}/profile"]
        subprocess.run([*command, f"--screenshot={picture}", page.as_uri()], check=True)
    with Image.open(picture) as full:
        few_colours = full.convert("RGB").quantize(32)
    few_colours.save(picture, optimize=True)


def report_figure(runs: Path, picture: Path) -> None:
    """Accuracy over steps, from `report RUNS --output DIR`."""
    with tempfile.TemporaryDirectory() as folder:
        report(runs, output=Path(folder) / "report")
        shutil.copyfile(Path(folder) / "report" / "figures" / "accuracy_by_steps.svg", picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", type=Path, help="a finished `train tiny`")
    parser.add_argument("--seeds", type=Path, help="runs of several seeds with and without replay")
    parser.add_argument("--smollm2", type=Path, help="a finished `train smollm2`")
    given = parser.parse_args()
    if given.tiny:
        (IMAGES / "train-tiny.svg").write_text(end_of_training(given.tiny), encoding="utf-8")
        screenshot_of_buffer(given.tiny, IMAGES / "buffer-page.png")
    if given.seeds:
        report_figure(given.seeds, IMAGES / "report-seeds.svg")
    if given.smollm2:
        report_figure(given.smollm2, IMAGES / "report-smollm2.svg")


if __name__ == "__main__":
    main()
