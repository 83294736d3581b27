"""The printed numbers of both papers (papers.yaml) against code, recipes, sweeps and the page."""

import re
from pathlib import Path

import pytest
import yaml

from grpo_replay.errors import RecipeError
from grpo_replay.evaluation.aes import accuracy_efficiency_score
from grpo_replay.lab.planning.theory import PowerGrowth, optimum
from grpo_replay.lab.report.costs import OWN_BEST
from grpo_replay.lab.sweep.cells import expand
from grpo_replay.lab.sweep.sweep_file import read_sweep_file
from grpo_replay.recipe import Machines, Recipe, load_recipe
from grpo_replay.recipe.open_lists import LossFacts
from grpo_replay.replay.compose import relative_compute
from grpo_replay.shipped_recipes import shipped_sweeps

PAPERS = yaml.safe_load(Path(__file__).with_name("papers.yaml").read_text())
A, B = PAPERS["paper_a"], PAPERS["paper_b"]
DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = "".join((DOCS / name).read_text() for name in ("results.md", "records/settings.md"))


def recipes_of(name: str) -> dict[str, Recipe]:
    """The recipe of every arm of a shipped sweep."""
    path = shipped_sweeps()[name]
    cells = expand(read_sweep_file(path), path, Path("out"))
    return {cell.arm: cell.resolved_recipe() for cell in reversed(cells)}


def split(words: str) -> tuple[int, int]:
    workers, trainers = map(int, words.split(","))
    return workers, trainers


def test_aes_of_grpo_is_what_paper_a_prints():
    for base, grpo, printed in zip(A["base"], A["grpo"], A["aes_of_grpo"], strict=True):
        score = accuracy_efficiency_score(*grpo, *base)[2]
        assert score == pytest.approx(printed, abs=0.0025)


def test_every_row_of_paper_a_s_ablations_is_an_arm_with_its_settings():
    arms = recipes_of("paper-a-ablations")
    ours_alone = {"pool-uniform-rollout"}
    assert arms.keys() == recipes_of("tiny-ablations").keys() - ours_alone == A["ablations"].keys()
    ours = load_recipe("qwen3-1.7b").replay
    for name, (changed, *_) in A["ablations"].items():
        replay = arms[name].replay
        differs = {
            key
            for key in type(ours).model_fields
            if key != "preset" and getattr(replay, key) != getattr(ours, key)
        }
        assert {key: getattr(replay, key) for key in changed} == changed
        assert differs == changed.keys() - {"preset"}, name
    assert len(arms) == 15


@pytest.mark.parametrize("table, name", [("table_3", "fifo-qwen3-0.6b"),
                                         ("table_1", "fifo-qwen2.5-7b")])  # fmt: skip
def test_gamma_by_workers_and_trainers_is_what_paper_b_prints(table, name):
    mu = B["mu"][name]
    for words, (printed, _) in B[table].items():
        workers, trainers = split(words)
        machines = Machines(workers=workers, trainers=trainers, mu=mu)
        assert machines.gamma == pytest.approx(relative_compute(machines.ratio, mu))
        if isinstance(printed, float):  # its Table 1 fits μ = 5.19: up to 0.016 larger
            assert machines.gamma == pytest.approx(printed, abs=0.017)
    assert Machines(workers=6, trainers=2, mu=6.84).gamma == pytest.approx(0.51, abs=0.001)
    assert Machines(workers=5, trainers=3, mu=6.84).gamma == pytest.approx(0.340, abs=0.0005)
    assert Machines(workers=4, trainers=4, mu=6.84).gamma == pytest.approx(0.255, abs=0.0005)


def test_arms_of_paper_b_have_the_observed_y_of_the_machines_that_they_are_charged_by():
    observed = {split(words): y for words, (_, y) in B["table_3"].items()}
    charged = 0
    for name in ("paper-b", "paper-b-sizes", "paper-b-learning-rates", "paper-b-variants"):
        for arm, recipe in recipes_of(name).items():
            replay, updates = recipe.replay, recipe.batch.updates_per_step
            drawn = replay.ratio if recipe.replays else 1
            assert drawn * recipe.rollouts_per_step / updates == B["batch"], (name, arm)
            assert recipe.sampling.group_size == B["group"]
            assert 2000 <= recipe.run.steps * updates <= 2002, (name, arm)
            if (machines := replay.machines) is not None:
                y = observed[machines.workers, machines.trainers]
                assert replay.ratio == pytest.approx(y, rel=0.025) and machines.mu == 6.84
                charged += 1
    assert charged == 3 + 10 + 27 + 7


def test_the_asynchronous_sweep_has_the_machines_that_it_is_charged_by():
    arms = recipes_of("paper-b-asynchronous")
    places = set()
    for recipe in arms.values():
        workers, trainers = recipe.sampling.servers.launch, recipe.engine.num_processes
        machines, updates = recipe.replay.machines, recipe.batch.updates_per_step
        drawn = recipe.replay.ratio if recipe.replays else 1
        assert recipe.run.mode == "async" and workers + trainers == 8
        assert drawn * recipe.rollouts_per_step / updates == B["batch"]
        assert recipe.run.steps * updates == 2000
        if recipe.replays:
            assert (machines.workers, machines.trainers) == (workers, trainers)
            places.add(f"{workers}, {trainers}")
        else:
            assert recipe.sampling.collection.order == "newest_first"
    assert places == {"6, 2", "5, 3", "4, 4"}


def test_the_sweeps_of_paper_b_cover_its_grid():
    sizes = [r.replay.capacity_rollouts for r in recipes_of("paper-b").values() if r.replays]
    sizes += [r.replay.capacity_rollouts for r in recipes_of("paper-b-sizes").values()]
    assert (min(sizes), max(sizes)) == (B["figure_3"]["smallest"], B["figure_3"]["largest"])
    variants, paper = recipes_of("paper-b-variants"), B["variants"]
    assert paper["asymre_delta"] == LossFacts.of("asymre").baseline_shift
    for recipe in variants.values():
        machines = recipe.replay.machines
        assert recipe.replay.capacity_rollouts == paper["capacity"]
        assert [machines.workers, machines.trainers] == paper["machines"]
    kinds = {(r.replay.positive_fraction, r.loss.kind) for r in variants.values()}
    assert {(delta, "clipped") for delta in paper["positive"]} < kinds
    assert (0.5, "asymre") in kinds and (0.0, "asymre") in kinds
    rates = recipes_of("paper-b-learning-rates")
    tried = {(r.optimizer.learning_rate, r.replay.capacity_rollouts, r.replay.ratio)
             for r in rates.values() if r.replays}  # fmt: skip
    assert len(rates) == 30 and len(tried) == 27


def test_a_null_ratio_is_that_of_the_machines_and_needs_them():
    words = ["replay.ratio=null", "replay.machines={workers: 5, trainers: 3, mu: 6.84}"]
    assert load_recipe("fifo-tiny", words).replay.ratio == pytest.approx(6.84 * 3 / 5)
    with pytest.raises(RecipeError, match=r"ratio: .*replay.machines"):
        load_recipe("fifo-tiny", words[:1])


def test_theory_and_report_have_the_papers_constants():
    paper = B["optimum"]
    best = optimum(paper["mu"], paper["rho"], PowerGrowth(paper["a"]))
    assert best == pytest.approx((paper["x"], paper["y"]), abs=0.0005)
    assert B["own_best"] == OWN_BEST


def test_the_page_has_every_printed_row_of_paper_b_and_of_paper_a():
    for table, mu in (("table_1", 5.28), ("table_3", 6.84)):
        places = [split(words) for words in B[table]]
        ours = [Machines(workers=w, trainers=t, mu=mu) for w, t in places]
        gammas, ratios = zip(*B[table].values(), strict=True)
        for numbers in (
            [f"{each.gamma:.3f}" for each in ours], [f"{each.ratio:.3f}" for each in ours],
            list(map(_cell, gammas)), list(map(_cell, ratios)),
        ):  # fmt: skip
            assert f"{', '.join(numbers[:-1])} and {numbers[-1]}" in PAGE, numbers
    for name, (_, accuracy, passed) in A["ablations"].items():
        row = rf"^\| `{name}` \|.*\| {accuracy:.2f} / {passed:.2f} \|$"
        assert re.search(row, PAGE, re.M), name
    for name, sizes in A["main"].items():
        cells = " | ".join(f"{accuracy:.2f} / {passed:.2f}" for accuracy, passed in sizes)
        assert f"| `{name}` | {cells} |" in PAGE, name
    for value in (*A["survivors"], *A["all_correct"], *A["all_wrong"]):
        assert f"{value}" in PAGE


def _cell(printed: float | str | None) -> str:
    return "–" if printed is None else str(printed)
