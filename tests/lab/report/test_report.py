"""`grpo-replay report`: numbers by hand, missing seeds, and what is refused."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from commands import run_report as run
from small_runs.experiments import BENCHMARKS, Size, write_run, write_sweep
from typer.testing import CliRunner

from grpo_replay.cli.app import app
from grpo_replay.errors import DataError, EvaluationFileError, UsageError
from grpo_replay.lab.report import costs
from grpo_replay.lab.report.collect import collect
from grpo_replay.lab.report.finished_run import Outcome
from grpo_replay.lab.report.measure import measure

SEEDS = (1, 2, 3)
SMALL = Size()
ARMS = {
    "grpo": (["replay.preset=grpo"], 0.1),
    "ours": (["replay.preset=ours"], 0.3),
    "age-1": (["replay.preset=ours", "replay.max_age_steps=1"], 0.2),
}


@pytest.fixture(scope="module")
def sweep(tmp_path_factory) -> Path:
    return write_sweep(tmp_path_factory.mktemp("sweeps") / "small", ARMS, SEEDS)


@pytest.fixture
def copy(sweep, tmp_path) -> Path:
    return Path(shutil.copytree(sweep, tmp_path / "copy"))


def report(capsys, *paths, **options) -> dict:
    run([str(path) for path in paths], as_json=True, **options)
    return json.loads(capsys.readouterr().out)


def arms_of(document: dict) -> dict[str, dict]:
    return {arm["name"]: arm for arm in document["arms"]}


def summary(cell: Path) -> dict:
    return json.loads((cell / "summary.json").read_text())


def test_means_medians_and_quartiles_are_those_of_the_summaries(sweep, capsys):
    ours = arms_of(report(capsys, sweep))["ours"]
    for name in ("mean", *BENCHMARKS):
        values = [summary(sweep / "ours" / f"seed-{seed}")["final"][name] for seed in SEEDS]
        found = ours["final"][name]
        assert found["mean"] == pytest.approx(sum(values) / 3)
        assert found["median"] == pytest.approx(sorted(values)[1])
        assert found["low"] == pytest.approx((sorted(values)[0] + sorted(values)[1]) / 2)


def test_differences_are_paired_by_seed(sweep, capsys):
    ours = arms_of(report(capsys, sweep))["ours"]["difference"]["mean"]
    each = [
        summary(sweep / "ours" / f"seed-{seed}")["final"]["mean"]
        - summary(sweep / "grpo" / f"seed-{seed}")["final"]["mean"]
        for seed in SEEDS
    ]
    assert ours["mean"] == pytest.approx(np.mean(each))
    assert ours["median"] == pytest.approx(np.median(each))
    assert ours["seeds"] == list(SEEDS) and ours["seeds_better"] == sum(d > 0 for d in each)
    assert ours["interval"][0] < ours["mean"] < ours["interval"][1]
    assert ours["interval_over"] == "seeds and problems"


def test_costs_are_sums_over_the_metrics(sweep, capsys):
    document = report(capsys, sweep, mu=[3.0])
    lines = [
        [json.loads(line) for line in (sweep / f"ours/seed-{s}/metrics.jsonl").open()]
        for s in SEEDS
    ]
    quantities = arms_of(document)["ours"]["quantities"]
    trained = [sum(line["cost/trained_rollouts"] for line in run) for run in lines]
    # 12 steps of 16 rollouts: c = B + μR.
    assert quantities["compute_3"]["mean"] == pytest.approx(np.mean(trained) + 3 * 12 * 16)
    seconds = [sum(line["step_time"] for line in run) for run in lines]
    assert quantities["training_seconds"]["median"] == pytest.approx(np.median(seconds))
    assert quantities["wall_seconds"]["mean"] == pytest.approx(np.mean(seconds) + 5)


def relog(cell: Path, **changes) -> list[dict]:
    """The metrics of a cell with changed values; None removes one."""
    file = cell / "metrics.jsonl"
    lines = [{**json.loads(line), **changes} for line in file.open()]
    lines = [{key: value for key, value in line.items() if value is not None} for line in lines]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return lines


def test_compute_and_mu_count_the_rollouts_that_steps_generated(copy, capsys):
    """Refills: 32 rollouts a step where the recipe asks for 16."""
    lines = relog(copy / "ours/seed-1", **{"cost/generated_rollouts": 32})
    quantities = arms_of(report(capsys, copy / "ours/seed-1", mu=[3.0]))["ours"]["quantities"]
    trained, training, generation = (
        sum(line[f"cost/{name}"] for line in lines)
        for name in ("trained_rollouts", "training_seconds", "generation_seconds")
    )
    assert quantities["compute_3"]["mean"] == pytest.approx(trained + 3 * 12 * 32)
    mu = (generation / (12 * 32)) / (training / trained)
    assert quantities["mu"]["mean"] == pytest.approx(mu)


def test_all_arms_are_compared_at_the_median_mu_of_all_runs(monkeypatch):
    monkeypatch.setattr(costs, "measured_mu", lambda lines: lines)
    runs = [SimpleNamespace(lines=mu) for mu in (1.0, None, 8.0, 3.0)]
    assert costs.measured_mu_of(runs) == 3.0


@pytest.mark.slow
def test_the_independent_script_finds_the_same_numbers(copy, capsys, tmp_path):
    shutil.rmtree(copy / "ours/seed-2")
    relog(copy / "ours/seed-1", **{"cost/generated_rollouts": 32})
    document = report(capsys, copy)
    script = Path(__file__).parents[3] / "benchmarks" / "recompute_report.py"

    def recompute() -> subprocess.CompletedProcess:
        file = tmp_path / "report.json"
        file.write_text(json.dumps(document))
        words = [sys.executable, str(script), str(file), str(copy)]
        return subprocess.run(words, capture_output=True, text=True)

    done = recompute()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 runs compared, 0 differ" in done.stdout
    document["arms"][0]["final"]["mean"]["interval"][0] += 1e-5
    done = recompute()
    assert done.returncode == 1 and "grpo.final.mean.interval[0]" in done.stdout


def test_a_missing_seed_is_listed_and_not_paired(copy, capsys):
    shutil.rmtree(copy / "ours/seed-2")
    (copy / "age-1/seed-3/summary.json").unlink()
    document = report(capsys, copy)
    ours, age = (arms_of(document)[name] for name in ("ours", "age-1"))
    assert ours["seeds"] == [1, 3]
    assert ours["missing"] == [{"seed": 2, "reason": "not started"}]
    assert age["missing"] == [{"seed": 3, "reason": "stopped after step 12 of 12"}]
    assert ours["difference"]["mean"]["seeds"] == [1, 3]
    run([str(copy)])
    printed = capsys.readouterr().out
    assert "ours, seed 2: not started" in printed and "2 of 3" in printed
    assert "ours: grpo lacks" not in printed
    log = copy / "log/ours/seed-2.log"
    log.parent.mkdir(parents=True)
    log.write_text("# process 1\nerror: the disk is full\n")
    assert arms_of(report(capsys, copy))["ours"]["missing"] == [
        {"seed": 2, "reason": "not started, failed: see log/ours/seed-2.log"}
    ]
    shutil.rmtree(copy / "grpo/seed-1")
    run([str(copy)])
    assert "ours: grpo lacks seed 1" in capsys.readouterr().out


def test_another_base_model_or_another_evaluation_is_refused(tmp_path):
    a = write_run(tmp_path / "a", ["model.path=one"], 1, 0.1)
    b = write_run(tmp_path / "b", ["model.path=two"], 1, 0.1)
    with pytest.raises(EvaluationFileError, match=r"trains model.path 'one', but .* 'two'"):
        run([str(a), str(b)])
    fewer = write_run(tmp_path / "fewer", ["model.path=one"], 2, 0.1, Size(samples=2))
    with pytest.raises(EvaluationFileError, match=r"4 samples of each problem in .*a, but 2 in"):
        run([str(a), str(fewer)])
    other = write_run(tmp_path / "other", ["model.path=one"], 2, 0.1, Size(problems=8))
    with pytest.raises(EvaluationFileError, match="easy has other problems"):
        run([str(a), str(other)])


def test_runs_outside_a_sweep_are_grouped_by_recipe(tmp_path, capsys):
    for seed in (1, 2):
        for age in (5, 10):
            overrides = ["replay.preset=ours", f"replay.max_age_steps={age}"]
            write_run(tmp_path / f"{age}-{seed}", overrides, seed, 0.2)
        write_run(tmp_path / f"grpo-{seed}", ["replay.preset=grpo"], seed, 0.1)
    arms = arms_of(report(capsys, tmp_path))
    assert list(arms) == ["ours max_age_steps=10", "ours max_age_steps=5", "grpo"]
    assert all(arm["seeds"] == [1, 2] for arm in arms.values())


OURS = ["replay.preset=ours"]


def test_arms_of_one_name_with_other_recipes_are_one_arm_and_the_keys_are_named(tmp_path, capsys):
    slow = ["optimizer.learning_rate=5e-5"]
    one = write_sweep(tmp_path / "one", {"ours": (OURS, 0.2)}, [1])
    two = write_sweep(tmp_path / "two", {"ours": ([*OURS, *slow], 0.2)}, [2])
    document = report(capsys, one, two)
    assert arms_of(document)["ours"]["seeds"] == [1, 2]
    assert document["notes"] == ["the runs of ours differ in optimizer.learning_rate"]


def test_steps_repeated_from_a_journal_have_no_time(copy, capsys):
    """They waited for no sampler, so their seconds are no cost of the run."""
    file = copy / f"ours/seed-{SEEDS[0]}/metrics.jsonl"
    lines = [json.loads(line) for line in file.open()]
    for line in lines:
        line["async/sampler_idle"] = 0.25
    for line in lines[3:8]:
        line |= {"async/sampler_idle": None, "cost/generation_seconds": None}
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    document = report(capsys, copy)
    assert any("steps were repeated from the journal" in note for note in document["notes"])
    assert "seconds" not in arms_of(document)["ours"]["equal_cost"]
    assert "generated_tokens" in arms_of(document)["ours"]["equal_cost"]
    assert arms_of(document)["ours"]["quantities"]["training_seconds"]["runs"] == len(SEEDS) - 1


def test_runs_with_servers_at_other_places_are_of_one_arm(tmp_path, capsys):
    for seed in (1, 2):
        port = f"sampling.servers.address=127.0.0.1:{8300 + seed}"
        write_run(tmp_path / f"{seed}", ["replay.preset=ours", port], seed, 0.1)
    assert arms_of(report(capsys, tmp_path))["ours"]["seeds"] == [1, 2]


def test_the_same_seed_twice_is_refused(tmp_path):
    for name in "ab":
        write_run(tmp_path / name, ["replay.preset=grpo"], 1, 0.1)
    with pytest.raises(UsageError, match=r"arm grpo has seed 1 twice: .*a and .*b"):
        run([str(tmp_path)])


@pytest.mark.parametrize("seeds", [1, 2])
def test_one_or_two_seeds_are_shown_instead_of_an_interval(tmp_path, capsys, seeds):
    for arm, gain, words in (
        ("grpo", 0.1, ["replay.preset=grpo"]),
        ("ours", 0.2, ["replay.preset=ours"]),
    ):
        for seed in range(seeds):
            write_run(tmp_path / f"{arm}-{seed}", words, seed, gain)
    arms = arms_of(report(capsys, tmp_path))
    for name in ("final", "difference"):
        mean = arms["ours"][name]["mean"]
        assert mean["interval"] is None and mean["interval_over"] is None
        assert len(mean["values"]) == seeds


def test_what_tuning_chose_is_listed_and_its_runs_are_left_out(copy, capsys):
    write_run(copy / "tune/ours/lr/seed-9", ["replay.preset=ours"], 9, 0.1)
    chosen = {"arms": {"ours": {"set": ["optimizer.learning_rate=1e-4"]}}}
    (copy / "chosen.json").write_text(json.dumps(chosen))
    ours = arms_of(report(capsys, copy))["ours"]
    assert ours["tuned"] == "optimizer.learning_rate=1e-4" and ours["seeds"] == list(SEEDS)


def test_arms_of_one_name_in_two_folders_are_compared_under_names(copy, sweep, capsys, monkeypatch):
    relog(copy / "ours/seed-1", step_time=9.0)
    found = arms_of(report(capsys, sweep / "grpo/seed-1", f"slow={copy / 'ours/seed-1'}"))
    assert list(found) == ["grpo", "slow"] and found["slow"]["difference"] is not None
    both = arms_of(report(capsys, f"old={sweep}", f"new={copy}"))
    assert list(both) == [f"{name}/{arm}" for name in ("old", "new") for arm in ARMS]
    write_run(copy / "a=b", ["replay.preset=grpo"], 9, 0.1)  # a path, not a name
    monkeypatch.chdir(copy)
    assert arms_of(report(capsys, "a=b"))["grpo"]["seeds"] == [9]


def rollouts_to(cell: Path, target: float) -> list[float]:
    """Rollouts trained on and generated until the accuracy, by hand from the files of a run."""
    lines = [json.loads(line) for line in (cell / "metrics.jsonl").read_text().splitlines()]
    values, found = accuracies(cell), []
    after = next(index for index, value in enumerate(values) if value >= target)
    share = (target - values[after - 1]) / (values[after] - values[after - 1])
    assert after > 0
    for metric in ("cost/trained_rollouts", "cost/generated_rollouts"):
        low, high = (sum(line[metric] for line in lines[: 4 * i]) for i in (after - 1, after))
        found.append(low + share * (high - low))
    return found


def test_the_break_even_is_where_the_costs_of_the_two_arms_are_equal(copy, capsys, tmp_path):
    for seed in SEEDS:
        relog(copy / f"ours/seed-{seed}", **{"cost/trained_rollouts": 32})
    options = {"reach": [42.0], "baseline": "age-1", "output": str(tmp_path / "tables")}
    found = arms_of(report(capsys, copy, **options))
    assert found["age-1"]["reach"][0]["break_even"] is None
    even = found["ours"]["reach"][0]["break_even"]
    spent = [
        [rollouts_to(copy / arm / f"seed-{s}", 0.42) for s in SEEDS] for arm in ("ours", "age-1")
    ]
    (trained, generated), (base_trained, base_generated) = np.mean(spent, axis=1)
    mu = (trained - base_trained) / (base_generated - generated)
    assert (even["pays"], even["seeds"]) == ("above", 3) and even["mu"] == pytest.approx(mu)
    figure = (tmp_path / "tables/figures/cost_by_mu.svg").read_text()
    assert "compute, relative to age-1" in figure and "ours" in figure
    for page in ("report.html", "report.md"):
        assert "Compute to 42.0 % relative to age-1" in (tmp_path / "tables" / page).read_text()
    run([str(copy)], "age-1", reach=[42.0])
    assert f"above {mu:.2g}" in capsys.readouterr().out


def test_an_accuracy_is_reached_by_the_runs_whose_best_evaluation_has_it(sweep):
    best = {
        name: [max(accuracies(sweep / name / f"seed-{seed}")) for seed in SEEDS] for name in ARMS
    }
    target = sorted(best["ours"])[1]
    for arm in measure(collect([str(sweep)]), [target])["arms"]:
        assert arm["reach"][0]["reached"] == sum(each >= target for each in best[arm["name"]])


def test_an_accuracy_that_is_not_reached_is_a_result(sweep, capsys):
    reach = arms_of(report(capsys, sweep, reach=[30.0, 99.0]))["ours"]["reach"]
    assert reach[1]["accuracy"] == 0.99 and reach[1]["reached"] == 0
    assert reach[1]["costs"]["steps"]["median"] is None
    assert reach[1]["costs"]["steps"]["ratio"] is None
    assert 0 <= reach[0]["costs"]["steps"]["median"] <= 12


def accuracies(run: Path) -> list[float]:
    files = sorted((run / "eval").glob("step_*.json"))
    return [json.loads(file.read_text())["mean"]["avg_at_k"] for file in files]


def test_paper_b_s_numbers_of_a_curve_are_those_of_the_evaluations(tmp_path, capsys):
    machines = "{workers: 5, trainers: 3, mu: 6.84}"
    arms = {
        "none": (["replay.preset=grpo"], 0.2),
        "fifo": (["replay.preset=fifo", f"replay.machines={machines}"], 0.3),
        "no-machines": (["replay.preset=fifo"], 0.3),
    }
    folder = write_sweep(tmp_path / "paper", arms, SEEDS)
    document = report(capsys, folder, baseline="none")
    points = []
    for name, arm in arms_of(document).items():
        runs = [folder / name / f"seed-{seed}" for seed in SEEDS]
        curves = list(map(accuracies, runs))
        gamma = (1 + 5 / 3) / (1 + 6.84)
        costs, to_98 = [], []
        for cell, curve in zip(runs, curves, strict=True):
            lines = [json.loads(x) for x in (cell / "metrics.jsonl").read_text().splitlines()]
            trained, generated = (
                np.cumsum([0] + [line[f"cost/{what}_rollouts"] for line in lines])
                for what in ("trained", "generated")
            )
            assert trained[-1] < generated[-1]  # groups were dropped: their generation counts
            without = (trained + 6.84 * generated) / (1 + 6.84)
            costs.append((gamma * trained if name == "fifo" else without)[[0, 4, 8, 12]])
            target = 0.98 * max(curve)
            after = next(i for i, value in enumerate(curve) if value >= target)
            spent = costs[-1][after]
            if after:
                share = (target - curve[after - 1]) / (curve[after] - curve[after - 1])
                spent = costs[-1][after - 1] + share * (spent - costs[-1][after - 1])
            to_98.append(spent)
        medians = np.median(curves, axis=0)
        found = arm["quantities"]
        assert found["compute_machines"]["mean"] == pytest.approx(np.mean(costs, axis=0)[-1])
        assert found["cost_to_98"]["median"] == pytest.approx(np.median(to_98))
        assert found["peak_of_median"]["mean"] == pytest.approx(medians.max())
        spent = np.median(costs, axis=0)
        points += [(c, v, name, s) for c, v, s in zip(spent, medians, (0, 4, 8, 12), strict=True)]
    best = [p for p in points if not any(q[1] >= p[1] and q[0] < p[0] for q in points)]
    frontier = {(round(p["cost"], 6), p["arm"], p["step"]) for p in document["frontier"]}
    assert len(frontier) > 2
    assert frontier <= {(round(c, 6), name, step) for c, _, name, step in best}


def test_of_evaluations_of_equal_cost_the_best_alone_is_on_the_frontier(sweep):
    """Counted in steps, every arm's evaluations cost the same."""
    arms = {arm.name: list(arm.runs.values()) for arm in collect([str(sweep)]).arms}
    steps = costs.usable_axes(arms["ours"], [])[0]
    expected, highest = [], -1.0
    for place, step in enumerate((0, 4, 8, 12)):
        medians = {
            name: np.median([accuracies(sweep / name / f"seed-{seed}")[place] for seed in SEEDS])
            for name in ARMS
        }
        assert sum(value > highest for value in medians.values()) > 1  # the worse would be new too
        highest = max(medians.values())
        expected.append((float(step), pytest.approx(highest)))
    found = costs.frontier(arms, steps, Outcome())
    assert [(point["cost"], point["accuracy"]) for point in found] == expected


def test_no_cost_is_read_off_a_line_between_the_base_and_the_end(copy, capsys):
    for seed in SEEDS:
        for step in (4, 8):
            (copy / f"ours/seed-{seed}/eval/step_{step:06d}.json").unlink()
    document = report(capsys, copy, reach=(40.0,))
    assert document["notes"] == [
        "no cost to an accuracy of ours: a run has fewer than 4 evaluations, the base's included "
        "(eval.every_steps)"
    ]
    for name, arm in arms_of(document).items():
        coarse = name == "ours"
        assert (len(arm["reach"]) == 0) == coarse
        assert ("cost_to_98" in arm["quantities"]) != coarse
        assert (arm["equal_cost"] == {}) == (coarse or name == "grpo")
    run([str(copy)], baseline="ours")
    assert "no cost to an accuracy of ours" in capsys.readouterr().out


def test_at_equal_cost_both_runs_have_spent_what_the_cheaper_one_did(copy, capsys):
    """`ours` is twice as slow: when it has spent GRPO's seconds it is at step 6 of 12, half way
    between its evaluations after steps 4 and 8."""
    for seed in SEEDS:
        for arm, seconds in (("grpo", 1.0), ("ours", 2.0)):
            relog(copy / arm / f"seed-{seed}", step_time=seconds)
    found = arms_of(report(capsys, copy))
    assert found["grpo"]["equal_cost"] == {}
    at = found["ours"]["equal_cost"]["seconds"]
    assert at["spent"]["median"] == 12.0
    ahead = []
    for seed in SEEDS:
        curve = accuracies(copy / "ours" / f"seed-{seed}")
        ahead.append((curve[1] + curve[2]) / 2 - accuracies(copy / "grpo" / f"seed-{seed}")[-1])
    difference = at["difference"]["mean"]
    assert difference["values"] == pytest.approx(ahead)
    assert difference["interval_over"] == "seeds and problems"
    assert ahead[0] < found["ours"]["difference"]["mean"]["values"][0]


@pytest.mark.parametrize(
    ("options", "place"),
    [
        (["--reach", "101"], "'--reach'"),
        (["--reach", "0.8"], "'--reach'"),  # 80 is meant
        (["--mu", "-1"], "'--mu'"),
        (["--metric", "pass"], "'pass@k'"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(sweep, options, place):
    done = CliRunner().invoke(app, ["report", str(sweep), *options])
    assert done.exit_code == 2 and place in done.output


def test_an_unknown_baseline_is_refused_with_the_arms(sweep):
    with pytest.raises(UsageError, match="--baseline our: the finished arms are grpo, ours, age-1"):
        run([str(sweep)], baseline="our")


def test_a_run_of_another_trainer_is_left_out_of_a_folder_and_refused_alone(tmp_path):
    run_dir = write_run(tmp_path / "runs/a", ["replay.preset=grpo"], 1, 0.1)
    other = tmp_path / "runs/in-trl"
    other.mkdir()
    for name in ("recipe.yaml", "metrics.jsonl"):
        shutil.copy(run_dir / name, other / name)
    assert [arm.name for arm in collect([str(tmp_path / "runs")]).arms] == ["grpo"]
    with pytest.raises(DataError, match="another trainer"):
        collect([str(other)])


def test_a_folder_without_a_finished_run_is_refused(tmp_path):
    with pytest.raises(DataError, match="no run, folder of runs or sweep"):
        run([str(tmp_path)])
    folder = write_sweep(tmp_path / "new", ARMS, [1], leave_out=[(name, 1) for name in ARMS])
    with pytest.raises(DataError, match="grpo seed 1: not started"):
        run([str(folder)])
