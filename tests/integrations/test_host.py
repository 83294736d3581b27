"""The base of all hosts, in a host of numpy alone: no TRL, no accelerate, no torch."""

import doctest
import json
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from edited_columns import edit

from grpo_replay import ReplayConfig
from grpo_replay.api import inspect
from grpo_replay.errors import (
    CheckpointError,
    OutputDirectoryError,
    RecipeError,
    SnapshotError,
    UsageError,
)
from grpo_replay.integrations import host
from grpo_replay.integrations.host import (
    SNAPSHOT,
    HostRun,
    HostWords,
    Row,
    RowAssignment,
    replay_settings,
)
from grpo_replay.integrations.host_rows import hash_of
from grpo_replay.lab.inspection.source import open_source
from grpo_replay.lab.planning.estimate import measured_mu
from grpo_replay.lab.verification.verify import verify_run
from grpo_replay.types import RolloutOutcome

WORDS = HostWords(
    settings="mine.yaml", folder="runs_in", resume="go_on_from", group_size="samples",
    checkpoints="saved-*",
)  # fmt: skip
SETTINGS = ReplayConfig.of("ours", ratio=1.0, warmup_steps=1, max_age_steps=3)


def sections(steps=6):
    return {
        "name": "mine",
        "model": {"path": "a/model"},
        "sampling": {"prompts_per_step": 3, "group_size": 4},
        "batch": {"updates_per_step": 1},
        "advantage": {"std": "sample", "epsilon": 1e-4},
        "run": {"seed": 5, "steps": steps},
    }


def row(prompt, tokens, reward, advantage, **changes):
    given = {
        "prompt_token_ids": prompt, "completion_token_ids": tokens,
        "behavior_logprobs": -np.arange(1, 1 + len(tokens)) / 8,
        "reward": reward, "advantage": advantage,
    }  # fmt: skip
    return Row(**given | changes)


def group_of(rng, prompt, **changes):
    rewards = np.array([1.0, -1.0, *rng.choice([-1.0, 1.0], 2)], np.float32)
    advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
    return [
        row(prompt, rng.integers(3, 9, 1 + i).tolist(), float(r), float(a), **changes)
        for i, (r, a) in enumerate(zip(rewards, advantages, strict=True))
    ]


def groups_of(step, **changes):
    """Three groups, a function of the step alone."""
    rng = np.random.default_rng(step)
    return [group_of(rng, [1, prompt], **changes) for prompt in rng.integers(3, 9, 3).tolist()]


def outcome(rollout):
    return RolloutOutcome(rollout.trained_tokens, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.5)


def begin(folder, settings=SETTINGS, checkpoint=None):
    run = HostRun(settings, 4, 5, folder, WORDS)
    run.describe(sections())
    if checkpoint is not None:
        run.load(checkpoint)
    run.open()
    return run


SECONDS = {"generation": 2.0, "training": 1.0}


def train(run, steps, saves=(), knows=True, birth=None, seconds=SECONDS):
    for number in steps:
        births = {} if birth is None else {"birth_step": birth(number)}
        step = run.step(groups_of(number, **births))
        found = dict(enumerate(map(outcome, step.rollouts))) if knows else None
        run.record(step, found, seconds)
        if number in saves:
            run.save(run.folder / f"saved-{number}")


def failed(folder):
    return [(check.name, check.detail) for check in verify_run(folder).checks if not check.passed]


def content(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize("knows", [True, False])
def test_a_run_leaves_what_the_commands_read(tmp_path, knows):
    """Also where the host does not know the outcomes of its updates."""
    train(begin(tmp_path), range(1, 7), saves=[6], knows=knows)
    assert failed(tmp_path) == []
    assert inspect(tmp_path).occupancy.stored_rollouts > 0
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    last = lines[-1]
    assert (last["fresh/rollouts"], last["replay/rollouts"]) == (12, 12)
    assert (last["cost/generation_seconds"], last["cost/mu"]) == (2.0, 2.0 / 12 / (1.0 / 24))
    assert (last["replay/ratio_mean"] is None) == (not knows)


def test_in_shadow_the_cost_ratio_counts_all_rows_that_the_host_trains_on(tmp_path):
    """Its own batch has the groups that replay drops: 12 rows a second, whatever survives."""
    run = begin(tmp_path, ReplayConfig.of("ours", shadow=True, warmup_steps=1))
    equal = [row([1, 3], [4, 5], 1.0, 0.0) for _ in range(4)]
    for groups, survivors in (([*groups_of(1)[:2], equal], 8), ([equal] * 3, 0)):
        found = run.record(run.step(groups), None, {"generation": 2.0, "training": 1.0})
        assert found["cost/trained_rollouts"] == survivors
        assert found["cost/mu"] == pytest.approx(2.0)
    assert measured_mu(open_source(tmp_path).metrics) == pytest.approx(2.0), "as plan has it"


def test_the_end_says_what_replay_took_or_in_shadow_would_take(tmp_path, capsys):
    """Rollouts of 2 s / 12 and updates of 1 s / 24: 5 draws of 12, in the compute
    B + μR = 132 + 4 · 72 of a run that replays."""
    run = begin(tmp_path / "replays")
    train(run, range(1, 4), saves=[3])
    train(resumed := begin(run.folder, checkpoint=run.folder / "saved-3"), range(4, 7))
    resumed.print_summary()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("grpo-replay: replay took 14.3 % of the compute; ")
    assert "cost 4 (μ) times" in line and "docs/results.md" in line
    shadow = begin(tmp_path / "shadow", SETTINGS.model_copy(update={"shadow": True}))
    shadow.print_summary()
    assert capsys.readouterr().out == "", "nothing is recorded yet"
    train(shadow, range(1, 7), knows=False)
    shadow.print_summary()
    would, cost = capsys.readouterr().out.splitlines()
    assert "in shadow: 10 rollouts a step would be replayed; no probe" in would
    assert "replay would take 21.7 % of the compute; " in cost and "cost 2 (μ) times" in cost
    train(unknown := begin(tmp_path / "unknown"), range(1, 3), seconds={"training": 1.0})
    unknown.print_summary()
    assert capsys.readouterr().out == ""


def test_rollouts_that_were_sampled_ahead_are_as_old_as_their_policy(tmp_path):
    run = begin(tmp_path)
    train(run, range(1, 7), saves=[6], birth=lambda number: max(1, number - 1))
    assert failed(tmp_path) == []
    assert set(run.buffer.column("birth_step").tolist()) == {4, 5}
    edit(tmp_path / "rollouts/step_000004.parquet", "birth_step", lambda birth: birth - 1)
    assert "birth_step 2" in dict(failed(tmp_path))["groups"]


def test_killed_and_resumed_is_never_killed(tmp_path):
    train(begin(tmp_path / "whole"), range(1, 7), saves=[3, 6])
    killed = begin(tmp_path / "killed")
    train(killed, range(1, 6), saves=[3])
    train(begin(tmp_path / "killed", checkpoint=tmp_path / "killed" / "saved-3"), range(4, 7), [6])
    assert content(tmp_path / "killed") == content(tmp_path / "whole")


def test_a_checkpoint_has_the_buffer_of_the_last_step_that_was_recorded(tmp_path):
    """The host plans two steps ahead when it saves."""
    train(begin(tmp_path / "whole"), range(1, 4), saves=[3])
    ahead = begin(tmp_path / "ahead")
    train(ahead, range(1, 4))
    planned = [ahead.step(groups_of(4)), ahead.step(groups_of(5))]
    assert ahead.is_inside_a_step
    ahead.save(tmp_path / "ahead" / "saved-3")
    one, other = (tmp_path / name / "saved-3" / SNAPSHOT for name in ("whole", "ahead"))
    assert one.read_bytes() == other.read_bytes()
    with pytest.raises(ValueError, match="step 5: record each step once, in their order"):
        ahead.record(planned[1])
    ahead.record(planned[0])
    with pytest.raises(ValueError, match="no outcome of 23 of 24 rows, the first is row 1"):
        ahead.record(planned[1], {0: outcome(planned[1].rollouts[0])})
    ahead.record(planned[1])
    assert not ahead.is_inside_a_step


def test_a_run_goes_on_with_its_own_settings_group_size_extras_and_files(tmp_path):
    folder = tmp_path / "run"
    train(begin(folder), range(1, 4), saves=[3])
    with pytest.raises(SnapshotError, match=r"replay.ratio is 1.0 in the file and 0.5 in the"):
        begin(folder, ReplayConfig.of("ours", ratio=0.5, warmup_steps=1, max_age_steps=3),
              folder / "saved-3")  # fmt: skip
    larger = HostRun(SETTINGS, 8, 5, folder, WORDS)
    with pytest.raises(CheckpointError, match="groups of 4: resume with samples 4"):
        larger.load(folder / "saved-3")
    run = HostRun(SETTINGS, 4, 5, folder, WORDS)
    with pytest.raises(CheckpointError, match="no reference with its rollouts: resume with beta 0"):
        run.load(folder / "saved-3", {"reference": "beta 0"})
    with pytest.raises(CheckpointError, match=f"resume with runs_in {folder}"):
        HostRun(SETTINGS, 4, 5, tmp_path / "new", WORDS).load(folder / "saved-3")
    (folder / "saved-3" / SNAPSHOT).unlink()
    with pytest.raises(CheckpointError, match=r"is missing, and .* in a new runs_in"):
        run.load(folder / "saved-3")
    with pytest.warns(UserWarning, match="the buffer begins empty"):
        begin(tmp_path / "plain", checkpoint=tmp_path / "plain" / "saved-3")


def test_the_folder_of_another_run_is_refused_in_the_words_of_the_host(tmp_path):
    train(begin(tmp_path), range(1, 3))
    again = HostRun(SETTINGS, 4, 5, tmp_path, WORDS)
    with pytest.raises(OutputDirectoryError, match=r"another runs_in, or .* with go_on_from"):
        again.refuse_another_run()
    (tmp_path / "saved-2").mkdir()
    again.refuse_another_run()  # to go on with
    with pytest.raises(OutputDirectoryError, match="another run"):
        begin(tmp_path)


def test_what_a_recipe_refuses_is_named_as_the_host_names_it(tmp_path):
    words = replace(WORDS, renamed=lambda text: text.replace("run.steps", "my_steps"))
    with pytest.raises(RecipeError, match=r"^mine.yaml: .*less than my_steps 1"):
        HostRun(SETTINGS, 4, 5, tmp_path, words).describe(sections(steps=1))


def test_groups_that_are_none_are_refused_and_no_id_is_taken(tmp_path):
    run, group = begin(tmp_path), groups_of(1)[0]
    other = replace(group[1], prompt_token_ids=[1, 2], prompt_id="")
    equal = [replace(each, reward=1.0) for each in group]
    late = [replace(each, birth_step=2) for each in group]
    for bad, message in (
        (group[:3], "group 1 has 3 completions, and samples is 4"),
        ([*group, group[0]], "group 1 has 5 completions, and samples is 4"),
        ([group[0], other, *group[2:]], "4 completions of group 1 have 2 different prompts: make"),
        (equal, "all rewards of group 1 are 1.0, but an advantage is .*: let the rewards have"),
        (late, "group 1 was born in steps 2 to 2: expected 1 to 1"),
    ):
        with pytest.raises(UsageError, match=message):
            run.step([group, bad])
    assert (run.buffer.next_rollout_id, run.buffer.next_group_id) == (0, 0)
    assert not run.is_inside_a_step


def test_what_does_not_train_is_logged_and_not_stored(tmp_path):
    run, (first, second, third) = begin(tmp_path), groups_of(1)
    first[0] = replace(first[0], reward=None, advantage=0.0)
    first[1] = replace(first[1], trains=False, truncated=True)
    first[2] = replace(first[2], completion_mask=[False] * 3)
    second = [replace(each, reward=1.0, advantage=0.0) for each in second]
    third = [replace(each, advantage=0.0) for each in third]
    step = run.step([first, second, third])
    assert [each.rollout_id for each in step.rollouts] == [3]
    assert [each.kept for each in step.generated] == [False] * 3 + [True] + [False] * 8
    assert [each.verdict for each in step.generated[:2]] == ["none", "scored"]
    assert [each.finish_reason for each in step.generated[:2]] == ["stop", "length"]
    assert step.filler.behavior_logprobs.tolist() == first[0].behavior_logprobs.tolist()


def test_a_group_is_as_old_as_its_oldest_member(tmp_path):
    run = begin(tmp_path)
    train(run, range(1, 4))
    rng = np.random.default_rng(0)
    group = [replace(each, birth_step=step)
             for each, step in zip(group_of(rng, [3]), [4, 2, 3, 4], strict=True)]  # fmt: skip
    generated = run.step([group]).generated
    assert {each.birth_step for each in generated} == {2}
    assert [each.policy_version_end for each in generated] == [3, 1, 2, 3]


def test_a_prompt_has_one_id_whenever_it_comes_and_whatever_it_is_kept_in():
    first, second = (row(prompt, [3], 1.0, 0.0) for prompt in ([1, 2], np.array([1, 2])))
    assert first.prompt_id == second.prompt_id == hash_of(np.array([1, 2], np.int64))
    assert row([1, 3], [3], 1.0, 0.0).prompt_id != first.prompt_id
    assert row([1, 3], [3], 1.0, 0.0, prompt_id="mine").prompt_id == "mine"


def test_a_row_takes_tensors_of_any_precision():
    import torch

    half = torch.tensor([-0.5, -0.25], dtype=torch.bfloat16, requires_grad=True)
    made = row(torch.tensor([1]), torch.tensor([3, 4]), 1.0, 0.0, behavior_logprobs=half,
               completion_mask=torch.tensor([1, 0]), extras={"reference": half})  # fmt: skip
    assert made.behavior_logprobs.dtype == made.extras["reference"].dtype == np.float32
    assert made.completion_mask.tolist() == [True, False]
    assert made.sampler_logprobs.tolist() == [-0.5, -0.25]


@pytest.mark.parametrize(
    "given, message",
    [
        (
            {"ratoi": 1},
            r"mine.yaml: unknown key 'replay.ratoi' \(did you mean 'ratio'\?\); .*age",
        ),
        ({"preset": "our"}, "mine.yaml: replay.preset: .*'ours'.*found 'our'"),
        ({"preset": "fifo", "unused_first": True}, "mine.yaml: contradiction: "),
        (["ours"], r"mine.yaml: expected keys of replay and their values, found \['ours'\]"),
    ],
)
def test_settings_that_are_refused_name_the_place_that_they_are_in(given, message):
    with pytest.raises(RecipeError, match=f"^{message}"):
        replay_settings(given, "mine.yaml")


def test_settings_are_a_preset_and_keys():
    assert replay_settings(None, "x") == replay_settings({}, "x") == ReplayConfig()
    given = {"preset": "ours", "ratio": 0.25}
    assert replay_settings(given, "x") == ReplayConfig.of("ours", ratio=0.25)


@pytest.mark.parametrize("rows", range(12))
@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_every_row_is_dealt_once_with_one_weight(rows, processes, micro_batches):
    assignment = RowAssignment(rows, processes, micro_batches)
    shares = [assignment.rows_for(process) for process in range(processes)]
    assert sorted(n for share in shares for n in share if n >= 0) == list(range(rows))
    assert (
        {len(share) for share in shares} == {assignment.rows_per_process} == {sum(assignment.sizes)}
    )
    padding = sum(share.count(-1) for share in shares)
    assert padding == max(-rows % processes, micro_batches * processes - rows)
    for turn, size in enumerate(assignment.sizes):
        if not assignment.is_padding(turn):
            # A row's weight in the mean over processes and micro-batches.
            weight = assignment.weight(size) / size / processes / micro_batches
            assert weight == pytest.approx(1 / rows)


def test_the_example_of_the_module_is_a_host(tmp_path):
    lines = host.__doc__.split("\n\n    WORDS", 1)[1].split("\n\nEverything", 1)[0]
    scope = {**vars(host), "time": time}
    exec(textwrap.dedent("    WORDS" + lines), scope)
    updates, rng = [], np.random.default_rng(0)
    trainer = SimpleNamespace(
        replay={"preset": "ours", "warmup_steps": 1, "ratio": 1.0}, group_size=4, seed=1,
        output=tmp_path, model_name="a/model", prompts=3, steps=6, resume_from=None,
        update=lambda rollouts: updates.append([each.rollout_id for each in rollouts]),
    )  # fmt: skip
    replay = scope["Replay"](trainer)
    for _ in range(3):
        groups = [
            [
                SimpleNamespace(prompt=row.prompt_token_ids, tokens=row.completion_token_ids,
                                logprobs=row.behavior_logprobs, reward=row.reward,
                                advantage=row.advantage)
                for row in group_of(rng, [1, prompt])
            ]
            for prompt in (3, 4, 5)
        ]  # fmt: skip
        logged = replay.update(groups)
    replay.save(tmp_path / "step-3")
    assert logged["replay/rollouts"] == 12 and [len(each) for each in updates[-2:]] == [12, 12]
    assert failed(tmp_path) == []
    trainer.resume_from = tmp_path / "step-3"
    assert len(scope["Replay"](trainer).run.buffer) == 36
    assert doctest.testmod(host).attempted == 1


def test_the_base_loads_neither_torch_nor_a_trainer():
    program = (
        "import sys, grpo_replay.integrations.host, grpo_replay.integrations.grpo_config\n"
        "print(sorted({'torch', 'transformers', 'accelerate', 'trl', 'verl'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.stdout == "[]\n", found.stderr
