"""Make the pictures of the README: the end of a run in the terminal, and the top of the buffer's
page in Chromium.

    grpo-replay train tiny --output-dir runs/tiny
    python docs/make_pictures.py runs/tiny
"""

import argparse
import io
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from rich._export_format import CONSOLE_SVG_FORMAT

from grpo_replay.cli.run_display import print_result
from grpo_replay.terminal.console import PlainConsole

IMAGES = Path(__file__).resolve().parent / "images"
CHROMIUM = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--force-device-scale-factor=1"]  # fmt: skip


def end_of_training(run: Path) -> str:
    """What `train` prints at its end, as SVG that loads no font from elsewhere."""
    screen = {"record": True, "file": io.StringIO(), "force_terminal": True}
    console = PlainConsole(width=96, highlight=False, **screen)
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    print_result(run, summary, console)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="a finished `train tiny`")
    run = parser.parse_args().run
    (IMAGES / "train-tiny.svg").write_text(end_of_training(run), encoding="utf-8")
    screenshot_of_buffer(run, IMAGES / "buffer-page.png")


if __name__ == "__main__":
    main()
