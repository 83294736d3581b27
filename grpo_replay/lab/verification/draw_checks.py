"""Checks of draws/: candidates, number of draws, ages and first-draw probabilities."""

import numpy as np

from grpo_replay.lab.inspection.rollout_columns import find_rows
from grpo_replay.lab.verification.run_files import Check, Columns, RunFiles, chosen, naming
from grpo_replay.recipe import ReplaySection
from grpo_replay.recipe.open_lists import PRIORITIES
from grpo_replay.replay.priorities import EPSILON

_LOGGED_AS = {"completion_tokens": "completion_token_ids"}  # RunFiles has the lengths of lists


class _Units:
    """What one draw can take: rollouts, or queries with all their rollouts. C candidates, U units.

    A draw takes by P ∝ p^α · exp(-age/τ), p the mean over a unit's rollouts. With `unused_first`
    the units never drawn and the others have a distribution each; `drawn_before_U` is False without
    it. Rollouts that were drawn too often or too lately are no candidates."""

    def __init__(
        self,
        run: RunFiles,
        step: int,
        candidate_C: np.ndarray,
        uses_N: np.ndarray,
        last_use_N: np.ndarray,
    ) -> None:
        settings = run.recipe.replay
        uses_C, rest_C = uses_N[candidate_C], step - last_use_N[candidate_C]
        may_C = (uses_C == 0) | (settings.cooldown_steps == 0) | (rest_C > settings.cooldown_steps)
        candidate_C = candidate_C[may_C & (uses_C < (settings.max_uses or np.inf))]
        self.candidate_C = candidate_C
        name = "group_id" if settings.unit == "query" else "rollout_id"
        _, self.first_U, self.unit_C, self.size_U = np.unique(
            run.rollouts[name][candidate_C],
            return_index=True, return_inverse=True, return_counts=True,
        )  # fmt: skip
        self.drawn_before_U = (uses_N[candidate_C] > 0)[self.first_U] & settings.unused_first
        p_C = priorities(run, settings, candidate_C)
        p_U = np.bincount(self.unit_C, p_C, len(self.size_U)) / self.size_U
        self.log_weight_U = np.zeros(len(p_U))
        if settings.priority_exponent > 0:
            with np.errstate(divide="ignore"):
                self.log_weight_U = settings.priority_exponent * np.log(p_U)
        if settings.age_decay_steps is not None:
            age_C = step - run.rollouts["birth_step"][candidate_C]
            self.log_weight_U = self.log_weight_U - age_C[self.first_U] / settings.age_decay_steps
        self.drawable_U = np.isfinite(self.log_weight_U)

    def probability_U(self) -> np.ndarray:
        """P of each unit in its distribution; 0 for those that are never drawn."""
        probability_U = np.zeros(len(self.size_U))
        for before in (False, True):
            members = self.drawable_U & (self.drawn_before_U == before)
            if members.any():
                log_weight = self.log_weight_U[members]
                weight = np.exp(log_weight - log_weight.max())
                probability_U[members] = weight / weight.sum()
        return probability_U


class DrawChecks:
    """The checks of a run's draws. `check` is called for every step with the candidates."""

    def __init__(self, run: RunFiles) -> None:
        self.run = run
        self.effective_sample_size: float | None = None  # of the step checked last
        self.entropy: float | None = None  # likewise, nats
        self.stored = Check("stored when drawn", "drawn rollouts were in the buffer, or the pool")
        self.counts = Check("draw counts", "as many units as ratio and composition ask for")
        self.units = Check("drawn units", "whole queries, none twice in a draw without replacement")
        self.ages = Check("ages", "step - birth_step, within the limits")
        self.probabilities = Check("probabilities", "P = p^alpha / sum p^alpha recomputed")

    def check(
        self,
        step: int,
        candidate_C: np.ndarray,
        survivors: int,
        uses_N: np.ndarray,
        last_use_N: np.ndarray,
    ) -> np.ndarray:
        """Check the draw of one step from the rows `candidate_C`, oldest first. Returns the drawn
        rows that exist. `survivors` is B'; `uses_N` and `last_use_N` are those before the step."""
        self.effective_sample_size = self.entropy = None
        draws = self.run.draws_of(step)
        rows = self.run.rows_of(draws["rollout_id"])
        uses_N, last_use_N = uses_N.copy(), last_use_N.copy()
        stored = np.isin(rows, candidate_C)
        self.stored.expect_all(stored, naming(f"step {step}, drawn but not stored", draws, "step"))
        self._check_ages(step, draws, rows)
        if not stored.all():
            return rows[rows >= 0]
        for asked, mine in self._single_draws(step, draws, self._asked(step, survivors)):
            units = _Units(self.run, step, candidate_C, uses_N, last_use_N)
            self._check_draw(step, chosen(draws, mine), rows[mine], units, asked)
            np.add.at(uses_N, rows[mine], 1)
            last_use_N[rows[mine]] = step
        return rows

    def _check_ages(self, step: int, draws: Columns, rows: np.ndarray) -> None:
        settings, age_N = self.run.recipe.replay, draws["age_steps"]
        births = self.run.rollouts["birth_step"][rows]
        right_N = (draws["step"] == step) & (age_N >= settings.anchors_fresh)
        right_N &= (rows < 0) | (age_N == step - births)
        if settings.max_age_steps is not None:
            right_N &= age_N <= settings.max_age_steps
        if "update" in draws:
            first = self.run.recipe.draws_per_step * (step - age_N - 1) + 1
            right_N &= draws["age_updates"] == draws["update"] - first
        found = {**draws, "birth_step": births}
        self.ages.expect_all(
            right_N, naming(f"step {step}", found, "step", "age_steps", "birth_step")
        )

    def _asked(self, step: int, survivors: int) -> int:
        """Number of units to draw according to the recipe. R is what the step generated; an
        asynchronous step draws as many whatever has arrived."""
        recipe = self.run.recipe
        settings, rows = recipe.replay, self.run.rows_of_step[step]
        if not settings.replays or step <= settings.warmup_steps:
            return 0
        generated = recipe.rollouts_per_step if recipe.run.is_async else rows.stop - rows.start
        rollouts = settings.ratio * generated
        if not settings.stores_first:
            rollouts = (settings.ratio + settings.pools_fresh) * survivors
        return round(rollouts / (recipe.sampling.group_size if settings.unit == "query" else 1))

    def _single_draws(self, step: int, draws: Columns, asked: int) -> list[tuple[int, np.ndarray]]:
        """For each draw of the step the units asked for, and the rows of its file: one draw, or one
        for each update."""
        updates = self.run.recipe.draws_per_step
        if updates == 1:
            return [(asked, np.arange(len(draws["step"])))]
        update_N = draws.get("update", draws["step"]) - updates * (step - 1) - 1
        return [
            (asked // updates + (each < asked % updates), np.flatnonzero(update_N == each))
            for each in range(updates)
        ]

    def _check_draw(
        self, step: int, draws: dict[str, np.ndarray], rows_D: np.ndarray, units: _Units, asked: int
    ) -> None:
        """Check one draw of `asked` units."""
        settings = self.run.recipe.replay
        place_D = find_rows(units.candidate_C, rows_D)
        rested_D = place_D >= 0
        self.units.expect_all(
            rested_D, naming(f"step {step}, drawn too often or too lately", draws, "step")
        )
        if not rested_D.all():
            return
        unit_D = units.unit_C[place_D]
        drawn = unit_D[place_D == units.first_U[unit_D]]  # one for each query

        def times(unit: np.ndarray) -> np.ndarray:
            return np.bincount(unit, minlength=len(units.size_U))

        drawable = int(units.drawable_U.sum())
        refills = settings.with_replacement and drawable > 0
        expected = asked if refills else min(asked, drawable)
        self.counts.expect(
            len(drawn) == expected,
            f"step {step}: drew {len(drawn)} {settings.unit} unit(s), expected {expected} "
            f"(asked {asked} of {drawable} candidates)",
        )
        self.units.expect(
            np.array_equal(times(unit_D), units.size_U * times(drawn))
            and (settings.with_replacement or len(np.unique(drawn)) == len(drawn)),
            f"step {step}: a {settings.unit} was drawn in part, or twice without replacement",
        )
        if settings.unused_first:
            new = int((units.drawable_U & ~units.drawn_before_U).sum())
            self.units.expect(
                np.array_equal(units.drawn_before_U[drawn], np.arange(len(drawn)) >= new),
                f"step {step}: did not draw the {new} never drawn before all others",
            )
        if not len(unit_D):
            return
        probability_U = units.probability_U()
        if self.effective_sample_size is None:  # those of the distribution that is used first
            used_first = units.drawn_before_U == units.drawn_before_U[unit_D[0]]
            P = probability_U[used_first & (probability_U > 0)]
            self.effective_sample_size = float(1 / (P**2).sum())
            self.entropy = -float((P * np.log(P)).sum())
        found_D, expected_D = draws["probability"], probability_U[unit_D]
        self.probabilities.expect_all(
            np.isclose(found_D, expected_D, rtol=1e-9, atol=1e-300),  # sums differ by 1e-13
            naming(f"step {step}", draws | {"recomputed": expected_D}, "probability", "recomputed"),
        )


def priorities(run: RunFiles, settings: ReplaySection, rows: np.ndarray) -> np.ndarray:
    """p of the rollouts `rows`: |A| and σ_g as the paper has them, or the function that the recipe
    names."""
    known = {"abs_advantage": "advantage", "group_std": "group_reward_std"}
    if settings.priority == "uniform":
        return np.ones(len(rows))
    if settings.priority in known:
        return np.abs(run.rollouts[known[settings.priority]][rows]) + EPSILON
    function = PRIORITIES.load(settings.priority)
    logged = {name: _LOGGED_AS.get(name, name) for name in function.columns}  # type: ignore[attr-defined]
    adds = EPSILON if getattr(function, "epsilon", True) else 0.0
    found = (
        function({name: run.rollouts[at][rows] for name, at in logged.items()}) if len(rows) else []
    )
    return np.asarray(found, dtype=np.float64) + adds
