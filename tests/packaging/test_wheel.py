"""The wheel carries everything that `train tiny` and `--dry-run` need without a checkout."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the package installed from its wheel, not editable."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, ROOT], check=True
    )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def _run(installed, code):
    environment = os.environ | {"PYTHONPATH": str(installed), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=installed, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_shipped_recipes_are_those_of_the_checkout(installed):
    code = (
        "import grpo_replay.recipe as r, pathlib\n"
        "folder = r.shipped_recipes_folder()\n"
        "for name in sorted(path.stem for path in folder.glob('*.yaml')):\n"
        "    print(name, r.load_recipe(name).name)"
    )
    expected = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
    assert _run(installed, code).split("\n")[:-1] == [f"{name} {name}" for name in expected]


def test_the_shipped_sweeps_are_those_of_the_checkout(installed):
    code = (
        "from grpo_replay.lab.sweep.sweep_file import read_sweep_file\n"
        "from grpo_replay.shipped_recipes import shipped_sweeps\n"
        "for name, path in shipped_sweeps().items(): print(name, read_sweep_file(path).name)"
    )
    expected = sorted(path.stem for path in (ROOT / "recipes" / "sweeps").glob("*.yaml"))
    assert _run(installed, code).split("\n")[:-1] == [f"{name} {name}" for name in expected]


@pytest.mark.parametrize("name", ["tiny", "tiny-long"])
def test_the_tiny_bases_load(installed, name):
    code = (
        "import grpo_replay, os\n"
        "from grpo_replay.engine.models import load_policy, load_tokenizer\n"
        "from grpo_replay.recipe import ModelSection\n"
        f"section = ModelSection(path='builtin:{name}')\n"
        "print(os.path.dirname(grpo_replay.__file__))\n"
        "print(sum(p.numel() for p in load_policy(section, 0).parameters()))\n"
        "print(load_tokenizer(section).decode(load_tokenizer(section)('1+2=')['input_ids']))"
    )
    place, parameters, text = _run(installed, code).split("\n")[:-1]
    assert Path(place) == installed / "grpo_replay"
    assert 100_000 < int(parameters) < 1_000_000
    assert text == "1+2="


def test_the_published_configurations_are_there(installed):
    code = (
        "from grpo_replay.engine.models import load_config\n"
        "from grpo_replay.recipe import ModelSection\n"
        "for name in ('qwen3-0.6b', 'qwen3-1.7b', 'qwen3-4b', 'qwen2.5-7b'):\n"
        "    section = ModelSection(path=f'builtin:{name}', random_init=True,\n"
        "                           tokenizer='builtin:bytes')\n"
        "    print(load_config(section).hidden_size)"
    )
    assert _run(installed, code).split() == ["1024", "2048", "2560", "3584"]
