"""verl's rows as groups of rollouts and back, how they are laid out for its workers, and what is
refused before Ray starts. Needs verl, but no Ray: seconds."""

from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("verl", reason="needs an environment with verl: .ci/check_verl")

from hydra import compose, initialize_config_module
from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from grpo_replay import ReplayConfig
from grpo_replay.errors import RecipeError, UsageError
from grpo_replay.integrations import verl, verl_rows
from grpo_replay.integrations.host import HostRun

END, LONGEST = 1, 4
PROMPTS = {"b": [5, 6], "a": [4]}


def row(prompt, completion, reward, advantage, mask=None):
    """A row as verl has it before its update."""
    tokens = torch.tensor(completion)
    mask = torch.ones_like(tokens) if mask is None else torch.tensor(mask)
    scores = torch.zeros(len(tokens))
    scores[-1] = reward
    logprobs = -0.1 * tokens.float()
    return {
        "prompts": torch.tensor(PROMPTS[prompt]), "responses": tokens, "response_mask": mask,
        "old_log_probs": logprobs, "rollout_log_probs": logprobs - 0.5, "rm_scores": scores,
        "advantages": advantage * mask.float(), "ref_log_prob": (2 * logprobs).bfloat16(),
    }  # fmt: skip


ROWS = {  # in the order of arrival
    "b_1_0": row("b", [9, 8, END], 0.0, -0.7),
    "a_0_0": row("a", [7, END], 1.0, 0.7),
    "b_0_0": row("b", [9, 3, 2, END], 1.0, 0.7, mask=[1, 0, 0, 1]),
    "a_1_0": row("a", [7, 7], 0.0, -0.7),
}


def groups_of(rows=ROWS, group_size=2):
    data = list_of_dict_to_tensordict(list(rows.values()))
    return verl_rows.groups_of(list(rows), data, group_size, str, LONGEST)


def completions(groups):
    return [[each.completion_token_ids.tolist() for each in group] for group in groups]


def test_groups_and_their_rows_are_in_the_order_of_tokens_not_of_arrival():
    expected = [[[7, 1], [7, 7]], [[9, 3, 2, 1], [9, 8, 1]]]
    backwards = dict(reversed(ROWS.items()))
    assert completions(groups_of()) == completions(groups_of(backwards)) == expected


def test_a_row_has_the_values_of_its_birth():
    (first, second), (tool, _) = groups_of()
    assert first.reward == 1.0 and first.advantage == pytest.approx(0.7)
    np.testing.assert_allclose(first.behavior_logprobs, [-0.7, -0.1], atol=1e-6)
    np.testing.assert_allclose(first.sampler_logprobs, [-1.2, -0.6], atol=1e-6)
    np.testing.assert_allclose(first.extras["ref_log_prob"], [-1.4, -0.2], atol=1e-2)
    assert first.completion_mask is None
    assert tool.completion_mask.tolist() == [True, False, False, True]
    assert tool.truncated, "it has as many tokens as fit"
    assert not (first.truncated or second.truncated), "[7, 7] may have met another end token"


def test_a_session_without_output_is_a_completion_without_a_reward():
    rows = {key: each for key, each in ROWS.items() if key != "a_1_0"}
    group = groups_of(rows)[0]
    assert [each.reward for each in group] == [1.0, None] and not group[1].may_train


def test_several_outputs_of_a_session_and_advantages_per_token_are_refused():
    with pytest.raises(UsageError, match="one output, with response_mask 0"):
        groups_of({**ROWS, "a_1_1": ROWS["a_1_0"]})
    uneven = {**ROWS["a_0_0"], "advantages": torch.tensor([0.7, 0.6])}
    with pytest.raises(UsageError, match="several advantages"):
        groups_of({**ROWS, "a_0_0": uneven})


def stepped(tmp_path, groups):
    """A step of a run whose buffer is empty: all survivors are trained on."""
    run = HostRun(ReplayConfig.of("ours"), 2, 0, tmp_path, verl.WORDS)
    run.describe(verl.sections_of(config(tmp_path), "sync", 40))
    return run.step(groups)


def test_rows_come_back_as_verl_had_them(tmp_path):
    step = stepped(tmp_path, groups_of())
    found = verl_rows.fields_of(step.rollouts, [2, -1, 0], END)
    for i, key in ((0, "b_0_0"), (2, "a_0_0")):
        original = ROWS[key]
        for name in ("prompts", "responses", "response_mask", "old_log_probs", "advantages"):
            torch.testing.assert_close(found[i][name], original[name])
        torch.testing.assert_close(found[i]["ref_log_prob"], original["ref_log_prob"].float())
        whole = torch.cat([original["prompts"], original["responses"]])
        assert torch.equal(found[i]["input_ids"], whole)
        assert torch.equal(found[i]["loss_mask"], original["response_mask"])
        assert torch.equal(found[i]["position_ids"], torch.arange(len(whole)))
    assert [int(each[verl_rows.ROW]) for each in found] == [2, -1, 0]
    padding = found[1]
    assert padding.keys() == found[0].keys() and not padding["loss_mask"].any()
    assert len(padding["input_ids"]) == len(padding["prompts"]) + len(padding["responses"]) == 2


def test_a_group_of_equal_rewards_is_dropped(tmp_path):
    nearly = torch.tensor([1e-9, 1e-9])  # a mean of float32 rounds
    equal = {
        key: {**ROWS[key], "rm_scores": torch.tensor([0.0, 0.1]), "advantages": nearly}
        for key in ("a_0_0", "a_1_0")
    }
    others = {key: each for key, each in ROWS.items() if key[0] == "b"}
    step = stepped(tmp_path, groups_of({**equal, **others}))
    assert [each.prompt_token_ids.tolist() for each in step.rollouts] == [[5, 6], [5, 6]]
    assert len(step.generated) == 4


def test_rollouts_stored_with_other_extras_are_refused(tmp_path):
    rollouts = list(stepped(tmp_path, groups_of()).rollouts)
    rollouts[1].extras.pop("ref_log_prob")
    with pytest.raises(UsageError, match=r"ref_log_prob.*as they were when the run began"):
        verl_rows.fields_of(rollouts, [0], END)


def mini_batches(order, size, ranks):
    """The rows of each update, as verl's workers cut them from what they are sent."""
    share = len(order) // ranks
    shares = [order[rank * share : (rank + 1) * share] for rank in range(ranks)]
    each = size // ranks
    return [
        [row for own in shares for row in own[start : start + each]]
        for start in range(0, share, each)
    ]


def test_every_update_has_its_rows_on_any_ranks_and_padding_only_where_rows_are_missing():
    rng, tried = np.random.default_rng(0), 0
    for rows in (1, 2, 3, 5, 8, 17, 64):
        for updates in (1, 2, 4):
            for ranks in (1, 2, 3):
                for micro_batch in (1, 3):
                    parts = min(updates, rows)
                    split = [np.sort(p) for p in np.array_split(rng.permutation(rows), parts)]
                    lengths = rng.integers(3, 40, rows).tolist()
                    order, size = verl_rows.layout(split, lengths, ranks, micro_batch)
                    assert size % (ranks * micro_batch) == 0
                    assert size - ranks * micro_batch < max(map(len, split)) <= size
                    found = mini_batches(order, size, ranks)
                    assert len(found) == parts
                    for update, part in zip(found, split, strict=True):
                        assert sorted(r for r in update if r >= 0) == part.tolist()
                    tried += 1
    assert tried == 126


def test_the_example_of_the_layout():
    split = [np.array([0, 2]), np.array([1])]
    assert verl_rows.layout(split, [3, 3, 3], 1, 1) == ([0, 2, 1, -1], 2)


def test_a_token_counts_as_clipped_where_verl_s_loss_has_no_gradient():
    class Config(SimpleNamespace):
        def get(self, name, default):
            return getattr(self, name, default)

    settings = Config(
        clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3.0,
        policy_loss={}, global_batch_info={},
    )  # fmt: skip
    ratio = torch.tensor([[0.5, 0.79, 0.81, 1.0, 1.27, 1.29, 2.9, 3.1]]).expand(2, -1)
    old = torch.full_like(ratio, -1.0)
    logprobs = (old + ratio.log()).requires_grad_()
    advantages = torch.tensor([[1.0], [-1.0]]).expand(-1, 8)
    mask = torch.ones_like(ratio)
    loss, _ = compute_policy_loss_vanilla(old, logprobs, advantages, mask, config=settings)
    loss.backward()
    found = verl_rows._clipped(settings, (logprobs - old).detach(), advantages)
    assert torch.equal(found, logprobs.grad == 0) and 0 < found.sum() < found.numel()
    settings.policy_loss = {"loss_mode": "gspo"}
    assert verl_rows._clipped(settings, logprobs - old, advantages) is None, "not known"


def test_outcomes_come_back_from_any_nesting_of_ranks_and_micro_batches():
    one, other = (7, 3, *[0.5] * 8), (2, 4, *[0.25] * 8)
    for values in ([one, other], [*one, *other], [[one], [other]]):
        found = verl_rows.outcomes_by_row(values)
        assert set(found) == {2, 7} and found[7].tokens == 3
        assert set(asdict(found[2]).values()) == {4, 0.25}


def test_what_verl_s_forward_pass_says_of_composed_rows(tmp_path):
    """Three rows, one of them padding, for which verl gives a log-prob of every position: that of
    the next token. Those before the response, and the tokens of a tool, say nothing."""
    rollouts = stepped(tmp_path, groups_of()).rollouts
    rows = verl_rows.fields_of(rollouts, [2, -1, 0], END)
    data = list_of_dict_to_tensordict(rows)
    given = []
    for each in rows:
        values = torch.full((len(each["input_ids"]),), 99.0)
        start = len(each["prompts"]) - 1
        values[start:-1] = each["old_log_probs"] + 0.5 * each["response_mask"]
        given.append(values)
    logprobs = torch.nested.as_nested_tensor(given, layout=torch.jagged)
    actor = config(tmp_path).actor_rollout_ref.actor
    found = verl_rows.row_outcomes(actor, logprobs, data)
    assert set(found) == {2, 0}
    assert {row: each.tokens for row, each in found.items()} == {
        row: int(rollouts[row].trained_tokens) for row in (0, 2)
    }
    for row, each in found.items():
        assert each.log_ratio_mean == pytest.approx(0.5, abs=1e-6)
        assert each.ratio_max == pytest.approx(np.exp(0.5), rel=1e-6)
        assert each.clip_fraction == (rollouts[row].advantage > 0), "1.65 is above 1.28"
        assert np.isnan(each.entropy)


# Refusals


def config(folder: Path, *words: str):
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(
            "ppo_trainer",
            [
                "trainer.v1.trainer_mode=replay", "+trainer.v1.replay.preset=ours",
                "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8",
                "actor_rollout_ref.model.path=model", "trainer.total_training_steps=40",
                f"trainer.default_local_dir={folder}", *words,
            ],
        )  # fmt: skip


def test_the_settings_of_verl_s_examples_pass(tmp_path):
    verl.check(config(tmp_path))
    verl.check(config(tmp_path, "actor_rollout_ref.actor.use_kl_loss=True"))
    verl.check(config(tmp_path, "trainer.total_training_steps=null"))
    verl.check(config(tmp_path, "+trainer.v1.replay.shadow=True"))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["algorithm.adv_estimator=gae"], "a critic"),
        (["critic.enable=True"], "a critic"),
        (["trainer.critic_warmup=5"], "critic_warmup=0"),
        (["algorithm.adv_estimator=rloo"], "adv_estimator=rloo: only grpo"),
        (["algorithm.use_kl_in_reward=True"], "use_kl_loss=True"),
        (["actor_rollout_ref.actor.ppo_epochs=2"], "ppo_epochs=2: set 1"),
        (["distillation.enabled=True"], "distillation.enabled=False"),
        (["trainer.use_v1=False"], "use_v1"),
        (["trainer.use_v1=False", "trainer.v1.replay.preset=grpo"], "use_v1"),
        (["+trainer.v1.replay.host_mode=later"], "host_mode=later.*colocate_async"),
        (["trainer.v1.trainer_mode=sync"], "trainer_mode=sync: set replay"),
        (["actor_rollout_ref.actor.clip_ratio_low=-1"], "actor.clip_ratio_low"),
    ],
)
def test_what_replay_cannot_do_is_refused_by_name(tmp_path, words, named):
    with pytest.raises(UsageError, match=named):
        verl.check(config(tmp_path, *words))


def test_an_unknown_key_of_replay_is_named_with_what_was_perhaps_meant(tmp_path):
    with pytest.raises(RecipeError, match=r"trainer\.v1\.replay: .*ratoi.*did you mean 'ratio'"):
        verl.check(config(tmp_path, "+trainer.v1.replay.ratoi=1"))


def test_another_version_of_verl_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(verl, "version", lambda name: "0.10.0")
    for words in ([], ["trainer.v1.replay.preset=grpo"]):
        with pytest.raises(UsageError, match=r"verl 0\.10\.0 is installed.*verl==0\.9\.1"):
            verl.check(config(tmp_path, *words))


def test_without_replay_nothing_of_verl_is_refused(tmp_path):
    off = "trainer.v1.replay.preset=grpo"
    verl.check(config(tmp_path, off, "algorithm.adv_estimator=gae"))


def test_a_folder_with_another_run_is_refused_before_anything_starts(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(Exception, match=r"trainer\.default_local_dir.*resume_mode=auto"):
        verl.check(config(tmp_path))
    (tmp_path / "global_step_2").mkdir()
    verl.check(config(tmp_path))
