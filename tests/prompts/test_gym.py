"""Problems of reasoning-gym as a source, as a benchmark, and their scorers as a reward."""

import json

import pytest
from small_runs.trained import train_small_run

from grpo_replay.errors import DatasetError
from grpo_replay.evaluation.benchmarks import find_benchmarks, load_problems
from grpo_replay.prompts import gym_problems
from grpo_replay.prompts.gym_problems import gym_rows, lenient_scorer_notice
from grpo_replay.prompts.prompt_set import read_source
from grpo_replay.recipe import resolve_recipe
from grpo_replay.recipe.input_sections import DatasetOptions
from grpo_replay.rewards.gym import points, score

CHAIN = "reasoning_gym:chain_sum"
SMALL = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}


def rows(seed, name=CHAIN, /, **options):
    found = gym_rows(name, DatasetOptions(**options), seed)
    return [found.row(index) for index in range(len(found))]


def questions(*args, **options):
    return [row["problem"] for row in rows(*args, **options)]


def test_neighbouring_seeds_have_other_problems_and_a_seed_the_same_ones():
    one, other = questions(42, size=300), questions(43, size=300)
    assert len(set(one)) == len(set(other)) == 300
    assert len(set(one) & set(other)) < 10
    assert questions(42, size=100) == one[:100]


def test_no_held_out_question_is_trained_on_whatever_the_seed_and_the_settings():
    held_out = {*questions(None, **SMALL), *questions(None)}
    trained = {*questions(0, size=400, **SMALL), *questions(7, size=400), *questions(7, **SMALL)}
    assert len(held_out) > 350 and not held_out & trained


def test_a_shortage_of_different_questions_is_refused():
    one_digit = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    with pytest.raises(DatasetError, match=r"only \d+ different training .* 1000 are needed"):
        rows(0, size=1000, **one_digit)


def test_a_family_with_many_repeats_takes_no_items_of_the_next_seed(monkeypatch):
    """Nine questions in a block; the next block has others."""

    class Repeats:
        def __getitem__(self, index):
            number = index % 9 if index < gym_problems.BLOCK else index
            return {"question": f"{number} + 1", "answer": f"{number + 1}"}

    monkeypatch.setattr(gym_problems, "BLOCK", 100)
    monkeypatch.setattr(gym_problems, "open_family", lambda family, settings, **of_items: Repeats())
    with pytest.raises(DatasetError, match=r"only \d different training .* 20 are needed"):
        rows(0, size=20)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("chain_sun", {}, "did you mean 'chain_sum'"),
        ("chain_sum", {"digits": 3}, "fields of reasoning_gym's ChainSumConfig, and size"),
        ("chain_sum", {"max_terms": 1}, "AssertionError"),
        ("chain_sum", {"size": "many"}, "dataset_options.size 'many'"),
        ("chain_sum", {"seed": 3}, "run.seed decides"),
        ("graph_color", {}, "no reference answer"),
        ("rearc", {"size": 30}, "gives its own answer"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_by_name(name, options, said):
    with pytest.raises(DatasetError, match=said):
        rows(0, f"reasoning_gym:{name}", **options)


def test_points_are_those_of_the_last_box_or_answer_tag_by_the_family_s_own_rule():
    (row,) = rows(0, size=1, **SMALL)
    gold = row["answer"]
    for joined in ("so", "or"):  # the last one, also of those that a list would join
        assert score(rf"\boxed{{1}} {joined} \boxed{{{gold}}}", row) == 1
    assert score(f"<answer>1</answer> or <answer> {gold} </answer>", row) == 1
    # chain_sum gives the share of the text that the answer is
    assert score(rf"\boxed{{{gold} cows}}", row) == len(gold) / len(f"{gold} cows")
    assert score(f"The answer is {gold}.", row) == 0
    with pytest.raises(KeyError, match="not a problem of reasoning_gym"):
        score("", {"problem": "1+1"})


def test_a_scorer_that_raises_gives_no_points():
    assert points("chain_sum", "{}", "3", {"question": "an entry without its answer"}) == 0


def test_points_for_nonsense_are_said():
    assert lenient_scorer_notice(CHAIN, gym_rows(CHAIN, DatasetOptions(size=1), 0)) == []
    generous = "reasoning_gym:game_of_life_halting"
    (notice,) = lenient_scorer_notice(generous, gym_rows(generous, DatasetOptions(size=1), 0))
    assert "points for the answer '?'" in notice


def test_the_family_scores_unless_another_verifier_is_named():
    of_gym = {"prompts": {"source": CHAIN}, "eval": {"benchmarks": [CHAIN]}}
    recipe = resolve_recipe([of_gym])
    assert recipe.reward.function == recipe.eval.reward == "reasoning_gym"
    named = resolve_recipe([of_gym, {"reward": {"function": "boxed"}, "eval": {"reward": "boxed"}}])
    assert named.reward.function == named.eval.reward == "boxed"
    mixed = resolve_recipe([{"prompts": {"source": [CHAIN, "builtin:tiny"]}}])
    assert mixed.reward.function == "boxed" and mixed.eval.reward == "boxed"


def test_a_benchmark_has_the_settings_of_the_training_problems_and_none_of_them():
    options = {**SMALL, "size": 300}
    recipe = resolve_recipe(
        [
            {
                "prompts": {"source": CHAIN, "dataset_options": options},
                "eval": {"benchmarks": [CHAIN]},
            }
        ]
    )
    (benchmark,) = find_benchmarks(recipe.eval, recipe.prompts)
    problems = load_problems(benchmark, recipe.eval)
    assert benchmark.name == "chain_sum" and len(problems) == gym_problems.HELD_OUT_SIZE
    assert [each.text for each in problems] == questions(None, **options)
    assert not {each.text for each in problems} & set(read_source(recipe.prompts, 3).problems)


@pytest.mark.slow
def test_a_run_is_rewarded_by_points_and_evaluated_by_them(tmp_path):
    """The tiny model writes a sum's digits now and then; the mixture has problems of both
    families."""
    run = train_small_run(
        tmp_path / "run",
        prompts={
            "max_prompt_length": 120,
            "source": [
                {"source": CHAIN, "dataset_options": {**SMALL, "size": 40}},
                {"source": "reasoning_gym:gcd", "dataset_options": {"size": 20}},
            ],
        },
        reward={"function": "reasoning_gym"},
        eval={"benchmarks": [CHAIN], "max_problems": 10, "reward": "reasoning_gym", "samples": 2},
        run={"steps": 2},
        replay={"warmup_steps": 0},
    )
    names = {json.loads(line)["step"] for line in (run.path / "metrics.jsonl").open()}
    assert names == {1, 2}
    report = json.loads((run.path / "eval" / "step_000002.json").read_text())
    result = report["benchmarks"]["chain_sum"]
    assert result["n"] == 10 and 0 <= result["mean_score"] <= 1
    assert result["avg_at_k"] <= result["mean_score"]
    environment = json.loads((run.path / "environment.json").read_text())
    assert environment["packages"]["reasoning-gym"] == "0.1.25"
