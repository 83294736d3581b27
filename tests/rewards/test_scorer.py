"""The scorer: order, caching, limits, and workers that crash or hang."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from processes_left import ends, is_alive

from grpo_replay.errors import DatasetError, RecipeError
from grpo_replay.recipe import RewardSection
from grpo_replay.rewards.pool import LOGGED_LINES
from grpo_replay.rewards.scorer import GradingRequest, RewardScorer, _Submission
from grpo_replay.types import Verdict

SYMBOLIC_SECONDS = 2.0


def scorer(function: str, workers: int = 1, **settings) -> RewardScorer:
    return RewardScorer.open(RewardSection(function=function, workers=workers, **settings))


@pytest.fixture(scope="module")
def symbolic():
    with scorer("math_verify", workers=2, time_limit_seconds=SYMBOLIC_SECONDS) as opened:
        yield opened


def test_verdicts_are_returned_in_submission_order(symbolic):
    items = [(f"\\boxed{{{n % 17}}}", str(n % 5), None) for n in range(300)]
    verdicts = symbolic.score(items)
    assert [v.reward for v in verdicts] == [1.0 if n % 17 == n % 5 else -1.0 for n in range(300)]
    assert symbolic.score(items[::-1]) == verdicts[::-1]


def test_submitting_returns_at_once_and_results_are_keyed(symbolic):
    """A verdict that was waited for would take its limit."""
    started = time.monotonic()
    symbolic.submit(("a", 1), GradingRequest("\\boxed{(x+y+1)^{60}}", "5"))
    symbolic.submit("b", GradingRequest("\\boxed{5}", "5"))
    assert time.monotonic() - started < SYMBOLIC_SECONDS
    results = symbolic.results()
    assert list(results) == [("a", 1), "b"]
    assert results["b"] == Verdict(1.0, "correct", (1.0,))
    assert results[("a", 1)] == Verdict(-1.0, "timeout", (-1.0,))
    assert symbolic.results() == {}


def test_unparsable_reference_answers_are_named(symbolic):
    symbolic.score([("\\boxed{5}", "", None), ("\\boxed{5}", "5", None)])
    assert symbolic.unparsable_answers == {""}


def test_rewards_are_those_of_the_recipe():
    with scorer("minerva", correct=3.0, incorrect=0.5) as opened:
        verdicts = opened.score([("\\boxed{1}", "1", None), ("\\boxed{2}", "1", None)])
    assert [v.reward for v in verdicts] == [3.0, 0.5]


def test_a_users_function_sees_the_row_and_is_called_every_time():
    with scorer("judge_rewards:half_for_hint") as opened:
        row = {"hint": "key", "n": np.int64(3), "v": np.arange(2)}
        verdicts = opened.score([("the key", "", row), ("nothing", "", row)])
        assert verdicts == [Verdict(0.5, "scored", (0.5,)), Verdict(-0.25, "scored", (-0.25,))]
        with pytest.raises(DatasetError, match="hint, file"):
            opened.score([("a", "", {"hint": "a", "file": object()})])
    with scorer("judge_rewards:Count.calls") as opened:
        verdicts = opened.score([("same", "", {})] * 3)
    assert [v.reward for v in verdicts] == [1.0, 2.0, 3.0]


@pytest.mark.slow
def test_a_users_function_that_fails_is_counted_and_costs_only_its_own_verdict(caplog, monkeypatch):
    """A reward that did not come is None, never that of an incorrect answer."""
    monkeypatch.setattr("grpo_replay.rewards.scorer.MEMORY_LIMIT_MIB", 256)
    texts = ["ok", "raise", "nan", "die", "fine", "hang", "grow", "good"]
    with scorer("judge_rewards:misbehave", workers=2, time_limit_seconds=3.0) as opened:
        verdicts = opened.score([(text, "", {}) for text in texts] * 3)
    statuses = ["scored", "crash", "crash", "crash", "scored", "timeout", "memory", "scored"]
    assert [v.status for v in verdicts] == statuses * 3
    assert [v.reward for v in verdicts] == [2.0, None, None, None, 4.0, None, None, 4.0] * 3
    assert all(v.scores == () for v in verdicts if v.reward is None)
    assert "no such answer" in caplog.text or "returned nan" in caplog.text


@pytest.mark.slow
def test_programs_that_a_function_started_end_with_its_worker(tmp_path):
    texts = ("hang", "die", "fine")
    files = {text: tmp_path / text for text in texts}
    with scorer("judge_rewards:start_a_program", time_limit_seconds=4.0) as opened:
        verdicts = opened.score([(text, str(files[text]), {}) for text in texts])
    assert [verdict.status for verdict in verdicts] == ["timeout", "crash", "scored"]
    pids = {text: int(file.read_text()) for text, file in files.items()}
    left = {text for text, pid in pids.items() if not ends(pid)}
    for text in left:
        os.kill(pids[text], signal.SIGKILL)
    assert not left


def test_no_verdict_waits_behind_a_slow_one_while_a_worker_is_free():
    """Also if the same worker would have been asked for all of them."""
    with scorer("judge_rewards:misbehave", workers=2, time_limit_seconds=600.0) as opened:
        opened.wait_ready()
        texts = ["ok"] * 40 + ["hang"] + ["ok"] * 40
        for key, text in enumerate(texts):
            opened.submit(key, GradingRequest(text, "", {}))
        arrived: dict = {}
        deadline = time.monotonic() + 60
        while len(arrived) < 80 and time.monotonic() < deadline:
            arrived |= opened.take_graded()
            time.sleep(0.01)
    assert sorted(arrived) == [key for key, text in enumerate(texts) if text == "ok"]


def test_a_verdict_is_taken_once(symbolic):
    symbolic.submit("a", GradingRequest("\\boxed{5}", "5"))
    while not symbolic.wait(1.0):
        pass
    assert list(symbolic.take_graded()) == ["a"]
    assert symbolic.take_graded() == {}


def test_completions_wait_for_their_group_only_where_a_function_needs_the_whole_group():
    both = ["minerva", "judge_rewards:prints"]
    with RewardScorer.open(RewardSection(function=both)) as opened:
        assert not opened._needs_whole_group()


def test_what_a_function_prints_goes_to_the_log_escaped_and_not_without_end(caplog, capfd):
    with caplog.at_level("INFO"), scorer("judge_rewards:prints", workers=1) as opened:
        opened.score([("\x1b[31mred", "1", {}), ("line", "5000", {}), ("x" * 5_000_000, "1", {})])
    said = [each.getMessage() for each in caplog.records if "printed" in each.getMessage()]
    assert said[0] == "a reward function printed: ␛[31mred"
    assert len(said) == LOGGED_LINES + 1 and said[-1].endswith("printed more, which is not logged")
    assert capfd.readouterr() == ("", "")


def test_a_verdict_does_not_depend_on_what_the_worker_did_before():
    with scorer("judge_rewards:die_unless_first") as opened:
        verdicts = opened.score([(str(n), "", {}) for n in range(4)])
    assert verdicts == [Verdict(1.0, "scored", (1.0,))] * 4


def test_a_file_that_waits_when_it_is_imported_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("grpo_replay.rewards.pool.START_TIMEOUT_SECONDS", 1.0)
    file = tmp_path / "waits.py"
    file.write_text("import time\ntime.sleep(60)\n\ndef score(completion):\n    return 1.0\n")
    with (
        scorer(f"{file}:score") as opened,
        pytest.raises(RecipeError, match=r"waits.py:score: not loaded after 1 s"),
    ):
        opened.score([("a", "b", None)])


@pytest.mark.parametrize("function", ["no_such_module:f", "judge_rewards:no_such_function"])
def test_a_function_that_cannot_be_loaded_is_an_error_not_a_verdict(function):
    with (
        scorer(function) as opened,
        pytest.raises(RecipeError, match=r"cannot be loaded: .*no_such"),
    ):
        opened.score([("a", "b", {})])


def test_workers_need_neither_torch_nor_a_gpu():
    program = (
        "import sys\n"
        "from grpo_replay.recipe import RewardSection\n"
        "from grpo_replay.rewards.scorer import RewardScorer\n"
        "with RewardScorer.open(RewardSection(function='math_verify')) as s:\n"
        "    assert s.score([('\\\\boxed{5}', '5', None)])[0].reward == 1.0\n"
        "    pids = [p._process.pid for p in s._pool._processes.values()]\n"
        "    for pid in pids:\n"
        "        maps = open(f'/proc/{pid}/maps').read()\n"
        "        env = open(f'/proc/{pid}/environ').read()\n"
        "        assert 'torch' not in maps and 'CUDA_VISIBLE_DEVICES=\\0' in env\n"
        "    assert len(pids) == 2\n"
        "assert not {'torch', 'math_verify', 'sympy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_workers_end_with_a_trainer_that_is_killed(tmp_path):
    """SIGKILL leaves the trainer no time to clean up, and a worker is busy."""
    program = (
        "import sys, time\n"
        "from grpo_replay.recipe import RewardSection\n"
        "from grpo_replay.rewards.scorer import GradingRequest, RewardScorer\n"
        "s = RewardScorer.open(RewardSection(function='judge_rewards:misbehave',"
        " time_limit_seconds=600))\n"
        "s.score([('ok', '', {})] * 50)\n"
        "s.submit('x', GradingRequest('hang', '', {}))\n"
        "time.sleep(0.5)\n"
        "print(*(p._process.pid for p in s._pool._processes.values()), flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2 and all(map(is_alive, pids))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert all(map(ends, pids))


def test_several_functions_are_weighted_and_each_score_is_kept():
    """By hand: 2 · 1 + 0.5 · 0.25 = 2.125 if right, 2 · -1 + 0.5 · 0.25 = -1.875 if wrong."""
    others = [{"function": "judge_rewards:quarter", "weight": 0.5, "name": "style"}]
    section = RewardSection(function=[{"function": "minerva", "weight": 2.0}, *others], workers=1)
    assert section.score_names == ("minerva", "style")
    with RewardScorer.open(section) as opened:
        verdicts = opened.score([("\\boxed{1}", "1", {}), ("\\boxed{2}", "1", {})])
    assert verdicts == [
        Verdict(2.125, "correct", (1.0, 0.25)), Verdict(-1.875, "incorrect", (-1.0, 0.25)),
    ]  # fmt: skip


def test_the_failure_of_one_of_several_functions_is_that_of_the_verdict():
    others = [{"function": "judge_rewards:misbehave"}]
    section = RewardSection(function=["minerva", *others], workers=1)
    with RewardScorer.open(section) as opened:
        verdicts = opened.score([("raise", "1", {}), ("\\boxed{1}", "1", {})])
        assert "no such answer" in opened.first_error
    assert verdicts == [
        Verdict(None, "crash", ()), Verdict(10.0, "correct", (1.0, 9.0)),
    ]  # fmt: skip


def test_none_says_that_there_is_no_reward_also_beside_other_functions():
    section = RewardSection(function=["minerva", "judge_rewards:none_if_asked"], workers=1)
    with RewardScorer.open(section) as opened:
        verdicts = opened.score([("none", "1", {}), ("\\boxed{1}", "1", {})])
        assert opened.first_error == "judge_rewards:none_if_asked returned None"
    assert verdicts == [Verdict(None, "none", ()), Verdict(1.5, "correct", (1.0, 0.5))]


def test_a_limit_is_the_completions_doing_in_a_verifier_and_the_functions_in_a_users():
    """Each function answers on its own, so the one that the limit ended is known."""
    others = [{"function": "judge_rewards:misbehave"}]
    section = RewardSection(function=["minerva", *others], workers=1, time_limit_seconds=5.0)
    with RewardScorer.open(section) as opened:
        (late,) = opened.score([("hang", "1", {})])
        in_the_verifier = opened._verdict(_Submission("1", [{"status": "timeout"}]))
    assert late == Verdict(None, "timeout", ())
    assert in_the_verifier == Verdict(-1.0, "timeout", (-1.0, 0.0))


def test_a_source_that_is_edited_while_it_is_in_use_is_not_loaded_by_a_new_worker(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import os\n\n\ndef f(completion):\n    return 1.0 if completion else os._exit(1)\n"
    )
    with scorer(f"{file}:f") as opened:
        assert [verdict.reward for verdict in opened.score([("a", "", {})])] == [1.0]
        file.write_text(file.read_text().replace("1.0", "2.0"))
        with pytest.raises(RecipeError, match=r"mine\.py:f was edited while the run uses it"):
            opened.score([("", "", {}), ("b", "", {})])


def test_as_verdicts_a_score_counts_as_correct_from_reward_correct_on():
    section = RewardSection(function="judge_rewards:misbehave", correct=4.0, workers=1)
    with RewardScorer.open(section, as_verdicts=True) as opened:
        verdicts = opened.score([("four", "", {}), ("ten", "", {})])
    assert [verdict.status for verdict in verdicts] == ["correct", "incorrect"]
    assert [verdict.reward for verdict in verdicts] == [4.0, 3.0]


def test_a_stopped_worker_does_not_hold_the_run():
    """SIGSTOP before the tasks are sent: they are larger than the pipe, so sending blocks."""
    with scorer("judge_rewards:half_for_hint", time_limit_seconds=5.0) as opened:
        opened.wait_ready()
        (process,) = opened._pool._processes.values()
        os.kill(process._process.pid, signal.SIGSTOP)
        started = time.monotonic()
        rows = [(f"{n}" * 300_000, "", {"hint": "0"}) for n in range(4)]
        verdicts = opened.score(rows)
        assert time.monotonic() - started < 60
    assert [verdict.status for verdict in verdicts] == ["timeout", "scored", "scored", "scored"]


def test_a_batch_function_gets_the_completions_of_a_prompt_together():
    """Also beside functions that take one, and of an incomplete group when nothing more comes."""
    functions = ["judge_rewards:above_the_mean", "judge_rewards:quarter", "minerva"]
    section = RewardSection(function=functions, workers=2)
    with RewardScorer.open(section) as opened:
        groups = {
            "a": ("x", "xxx", "\\boxed{4}"),
            "b": ("xx", "xxxx", "xx"),
            "c": ("", "xx"),
            "d": ("die",),
        }
        for place in (2, 0, 1):  # members of groups mixed, as samplers finish them
            for name, texts in groups.items():
                if place < len(texts):
                    request = GradingRequest(texts[place], "4", {}, group=name, group_size=3)
                    opened.submit((name, place), request)
        verdicts = opened.results()
        again = opened.score([("xx", "4", {})])[0]
    scores = {key: verdict.scores for key, verdict in verdicts.items()}
    third = 2 / 3
    assert [scores["a", place][0] for place in range(3)] == pytest.approx([-10 / 3, -4 / 3, 14 / 3])
    assert [scores["b", place][0] for place in range(3)] == pytest.approx(
        [-third, 2 * third, -third]
    )
    assert [scores["c", place][0] for place in range(2)] == [-1.0, 1.0]
    assert scores["a", 2][1:] == (0.25, 1.0) and scores["b", 0][1:] == (0.25, -1.0)
    assert (verdicts["d", 0].status, verdicts["d", 0].reward) == ("crash", None)
    assert again.scores[0] == 0.0, "a group of one"


def test_a_batch_comes_in_the_order_of_its_keys(tmp_path):
    (tmp_path / "own.py").write_text("def f(completions, rows):\n return [0, 1, 2]\n")
    with scorer(f"{tmp_path}/own.py:f") as opened:
        for key in (2, 0, 1):
            opened.submit(key, GradingRequest("x", "4", {}, group="a", group_size=3))
        assert {key: verdict.reward for key, verdict in opened.results().items()} == {
            0: 0,
            1: 1,
            2: 2,
        }
