"""What the base install does without torch, away from the checkout: run in an environment that has
only the base, from its wheel. Usage: check_base.py RUN_DIR, a finished `train tiny` run."""

import importlib.util
import subprocess
import sys
from pathlib import Path

READING = ["inspect-buffer {run}", "inspect-buffer {run} --json", "plan tiny",
           "plan --from-run {run}", "report {run}",
           "inspect-buffer {run} --verify", "inspect-buffer {run} --plot {run}/page.html",
           "report {run} --output {run}/report",
           "aes --reference 0.5,100 --candidate ours=0.6,90"]  # fmt: skip
TRAINING = ["train tiny --output-dir {run}/new", "train tiny --dry-run",
            "eval --ckpt {run}/checkpoints/latest"]  # fmt: skip


def call(command: str, run: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("grpo-replay")
    words = [word.format(run=run) for word in command.split()]
    return subprocess.run([program, *words], cwd=run, capture_output=True, text=True)


def main() -> None:
    run = Path(sys.argv[1]).resolve()
    assert importlib.util.find_spec("torch") is None, "this environment has torch"
    import grpo_replay

    assert "site-packages" in grpo_replay.__file__, grpo_replay.__file__
    from grpo_replay.shipped_recipes import shipped_recipes, shipped_sweeps

    for folder, shipped in (("recipes", shipped_recipes()), ("recipes/sweeps", shipped_sweeps())):
        ours = {path.stem for path in Path(folder).glob("*.yaml")}
        assert len(ours) >= 7 and ours == set(shipped), f"{folder}: {shipped}"
    package, data = Path(grpo_replay.__file__).parents[1], 0
    for pattern in ("grpo_replay/tiny/*base/*", "grpo_replay/models/**/*.json"):
        for path in Path().glob(pattern):
            assert (package / path).read_bytes() == path.read_bytes(), path
            data += 1
    assert (package / "grpo_replay/py.typed").exists(), "the wheel has no py.typed"
    assert data >= 20, f"{data} files of tiny bases and published configurations"
    assert grpo_replay.ReplayBuffer and grpo_replay.ReplayConfig and grpo_replay.Rollout
    for command in READING:
        done = call(command, run)
        assert done.returncode == 0, f"{command}: {done.stderr}"
    for command in TRAINING:
        done = call(command, run)
        assert done.returncode == 2 and "grpo-replay[train]" in done.stderr, f"{command}: {done}"
        assert "Traceback" not in done.stderr
    print(f"{len(READING)} commands read, {len(TRAINING)} name the missing extra")


if __name__ == "__main__":
    main()
