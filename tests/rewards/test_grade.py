"""`grpo_replay.grade`, as a program of the user's calls it."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from grpo_replay import grade
from grpo_replay.errors import UsageError
from grpo_replay.recipe import BUILTIN_VERIFIERS
from grpo_replay.types import Verdict


def test_a_completion_is_graded_also_from_threads():
    assert grade(r"so \boxed{\dfrac{1}{2}}", "1/2") == Verdict(1.0, "correct", (1.0,))
    assert grade(r"so \boxed{2}", "1/2") == Verdict(-1.0, "incorrect", (-1.0,))
    assert grade("so 1/2", "1/2").status == "unparsable"
    assert grade(r"so \boxed{\dfrac{1}{2}}", "1/2", verifier="minerva").status == "incorrect"
    with ThreadPoolExecutor(4) as threads:
        found = threads.map(lambda n: grade(f"\\boxed{{{n}.0}}", str(n - n % 2)), range(20))
        assert [each.status for each in found] == ["correct", "incorrect"] * 10


def test_a_name_that_is_no_verifier_and_a_missing_package_are_said(monkeypatch):
    with pytest.raises(UsageError, match=f"'boxd': use {', '.join(BUILTIN_VERIFIERS)}"):
        grade("", "", verifier="boxd")
    monkeypatch.setattr("grpo_replay.rewards.grading.has_module", lambda name: False)
    with pytest.raises(UsageError, match=r"pip install 'grpo-replay\[grade\]', or verifier minerv"):
        grade("", "")
    assert grade(r"\boxed{1}", "1", verifier="minerva").status == "correct"


def test_it_needs_the_base_and_math_verify_alone():
    program = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'datasets', 'psutil', 'msgspec', 'aiohttp'):\n"
        "    sys.modules[name] = None\n"
        "from grpo_replay import grade\n"
        "assert grade('\\\\boxed{0.5}', '\\\\frac{1}{2}').status == 'correct'\n"
        "assert not {'math_verify', 'sympy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
