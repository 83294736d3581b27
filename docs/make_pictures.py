"""Make the pictures of the README: the end of a run in the terminal, and the buffer's page in
Chromium, its figures and an opened rollout.

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
            "--force-device-scale-factor=1", "--no-first-run", "--disable-sync",
            "--disable-background-networking", "--disable-component-update"]  # fmt: skip
HIDE_ABOVE = "nav, h1, body > p, body > h2, .figures, .tables { display: none; }"


def end_of_training(run: Path) -> str:
    """What `train` prints at its end, as SVG that loads no font from elsewhere."""
    screen = {"record": True, "file": io.StringIO(), "force_terminal": True}
    console = PlainConsole(width=96, highlight=False, **screen)
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    print_result(run, summary, console)
    own_fonts = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    return console.export_svg(title="grpo-replay train tiny", code_format=own_fonts)


def screenshot_of_buffer(run: Path, picture: Path) -> None:
    """The page of `inspect-buffer RUN --plot page.html`: its figures above its rollouts, of which
    the one that was drawn most is opened."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        inspect = [sys.executable, "-m", "grpo_replay", "inspect-buffer", run.name]
        subprocess.run([*inspect, "--plot", str(page)], cwd=run.parent, check=True)
        text = page.read_text(encoding="utf-8")
        data = text.partition('id="data">')[2].partition("</script>")[0]
        rollouts = json.loads(data)["rollouts"]
        opened = max(rollouts, key=lambda each: (each["draws"], each["kl"] or 0))["id"]
        parts = []
        for place, height in (("", 690), (f"#rollout-{opened}", 600)):
            part = Path(folder) / f"part-{len(parts)}.png"
            # The second part begins with the rollouts: a copy of the page without what is above.
            page.write_text(text.replace("</style>", HIDE_ABOVE + "</style>") if place else text)
            command = [*CHROMIUM, f"--window-size=1280,{height}", f"--screenshot={part}"]
            profile = f"--user-data-dir={folder}/profile"
            subprocess.run([*command, profile, page.as_uri() + place], check=True)
            parts.append(Image.open(part).convert("RGB"))
    whole = Image.new("RGB", (1280, sum(part.height for part in parts)))
    for number, part in enumerate(parts):
        whole.paste(part, (0, number * parts[0].height))
    whole.quantize(128).save(picture, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="a finished `train tiny`")
    run = parser.parse_args().run
    (IMAGES / "train-tiny.svg").write_text(end_of_training(run), encoding="utf-8")
    screenshot_of_buffer(run, IMAGES / "buffer-page.png")


if __name__ == "__main__":
    main()
