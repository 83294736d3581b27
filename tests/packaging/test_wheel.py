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


def test_the_recipes_sweeps_tiny_bases_and_configurations_of_the_checkout_are_there(installed):
    code = (
        "import grpo_replay, os\n"
        "from grpo_replay.engine.models import load_config, load_policy, load_tokenizer\n"
        "from grpo_replay.lab.sweep.sweep_file import read_sweep_file\n"
        "from grpo_replay.recipe import ModelSection, load_recipe\n"
        "from grpo_replay.shipped_recipes import shipped_recipes, shipped_sweeps\n"
        "print(os.path.dirname(grpo_replay.__file__))\n"
        "print(*sorted(load_recipe(name).name for name in shipped_recipes()))\n"
        "print(*sorted(read_sweep_file(path).name for path in shipped_sweeps().values()))\n"
        "for name in ('tiny', 'tiny-long'):\n"
        "    section = ModelSection(path=f'builtin:{name}')\n"
        "    load_policy(section, 0)\n"
        "    print(load_tokenizer(section).decode(load_tokenizer(section)('1+2=')['input_ids']))\n"
        "for name in ('qwen3-0.6b', 'qwen3-1.7b', 'qwen3-4b', 'qwen2.5-7b'):\n"
        "    section = ModelSection(path=f'builtin:{name}', random_init=True,\n"
        "                           tokenizer='builtin:bytes')\n"
        "    print(load_config(section).hidden_size)"
    )
    place, recipes, sweeps, *others = _run(installed, code).splitlines()
    assert Path(place) == installed / "grpo_replay"
    assert recipes.split() == sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
    assert sweeps.split() == sorted(path.stem for path in (ROOT / "recipes/sweeps").glob("*.yaml"))
    assert others == ["1+2=", "1+2=", "1024", "2048", "2560", "3584"]
