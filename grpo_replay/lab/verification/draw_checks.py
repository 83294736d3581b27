"""Checks of draws/: candidates, number of draws, ages and first-draw probabilities."""

from collections.abc import Iterator

import numpy as np

from grpo_replay.lab.inspection.rollout_columns import find_rows
from grpo_replay.lab.verification.run_files import Check, RunFiles, describe_row
from grpo_replay.recipe import ReplaySection
from grpo_replay.recipe.open_lists import PRIORITIES
from grpo_replay.replay.priorities import EPSILON


class _Units:
    """The units that one draw chooses from: rollouts, or queries with all their rollouts.

    A unit is drawn with P ∝ p^α · exp(-age/τ), p the mean priority of its rollouts. With
    `unused_first` the units never drawn and the others have a distribution each; `drawn_before_U`
    is False without it. C candidates, U units."""

    def __init__(
        self,
        run: RunFiles,
        step: int,
        candidate_C: np.ndarray,
        uses_N: np.ndarray,
        last_use_N: np.ndarray,
    ) -> None:
        """`candidate_C` are rows of the run; `uses_N` and `last_use_N` those of all rows so far."""
        settings = run.recipe.replay
        is_drawable_C = _may_be_drawn(settings, uses_N[candidate_C], step - last_use_N[candidate_C])
        self.candidate_C = candidate_C = candidate_C[is_drawable_C]
        unit_id = "group_id" if settings.unit == "query" else "rollout_id"
        _, self.first_U, self.unit_C, self.size_U = np.unique(
            run.rollouts[unit_id][candidate_C],
            return_index=True, return_inverse=True, return_counts=True,
        )  # fmt: skip
        self.drawn_before_U = (uses_N[candidate_C] > 0)[self.first_U] & settings.unused_first
        p_C = priorities(run, settings, candidate_C)
        p_U = np.bincount(self.unit_C, p_C, len(self.size_U)) / self.size_U
        age_U = step - run.rollouts["birth_step"][candidate_C][self.first_U]
        self.log_weight_U = _log_weights(settings, p_U, age_U)
        self.drawable_U = np.isfinite(self.log_weight_U)

    def count(self, unit_D: np.ndarray) -> np.ndarray:
        """How often each unit occurs, [U]."""
        return np.bincount(unit_D, minlength=len(self.size_U))

    def probability_U(self) -> np.ndarray:
        """Compute P of each unit in its distribution; 0 for units of weight 0."""
        probability_U = np.zeros(len(self.size_U))
        for drawn_before in (False, True):
            members = self.drawable_U & (self.drawn_before_U == drawn_before)
            if members.any():
                log_weight = self.log_weight_U[members]
                weight = np.exp(log_weight - log_weight.max())
                probability_U[members] = weight / weight.sum()
        return probability_U


def _may_be_drawn(
    settings: ReplaySection, uses_C: np.ndarray, steps_since_use_C: np.ndarray
) -> np.ndarray:
    """Returns whether `max_uses` and `cooldown_steps` let each candidate be drawn."""
    has_rested_C = steps_since_use_C > settings.cooldown_steps
    has_rested_C |= (uses_C == 0) | (settings.cooldown_steps == 0)
    return has_rested_C & (uses_C < (settings.max_uses or np.inf))


def _log_weights(settings: ReplaySection, p_U: np.ndarray, age_U: np.ndarray) -> np.ndarray:
    """Computes α·log p - age/τ of each unit; -inf for one that is never drawn."""
    log_weight_U = np.zeros(len(p_U))
    if settings.priority_exponent > 0:
        with np.errstate(divide="ignore"):
            log_weight_U = settings.priority_exponent * np.log(p_U)
    if settings.age_decay_steps is not None:
        log_weight_U = log_weight_U - age_U / settings.age_decay_steps
    return log_weight_U


class DrawChecks:
    """The checks of a run's draws. Call `check` for every step, in order."""

    def __init__(self, run: RunFiles) -> None:
        """Opens the checks of a run, without comparisons yet."""
        self.run = run
        self.effective_sample_size: float | None = None  # of the last checked step
        self.entropy: float | None = None  # of the last checked step, nats
        self.stored = Check("stored when drawn", "drawn rollouts were in the buffer, or the pool")
        self.counts = Check("draw counts", "as many units as ratio and composition ask for")
        self.units = Check("drawn units", "whole queries, none twice in a draw without replacement")
        self.ages = Check("ages", "step - birth_step, within the limits")
        self.probabilities = Check(
            "probabilities", "P in proportion to p^alpha and exp(-age / tau) recomputed"
        )

    def check(
        self,
        step: int,
        candidate_C: np.ndarray,
        survivors: int,
        uses_N: np.ndarray,
        last_use_N: np.ndarray,
    ) -> np.ndarray:
        """Check the draws of one step from the rows `candidate_C`, oldest first. Returns the drawn
        rows that exist. `survivors` is B'; `uses_N` and `last_use_N` are those before the step."""
        self.effective_sample_size = self.entropy = None
        draws = self.run.draws_of(step)
        rows = self.run.rows_of(draws["rollout_id"])
        self._check_ages(step, draws, rows)
        is_stored = np.isin(rows, candidate_C)
        self.stored.expect_all(
            is_stored, describe_row(f"step {step}, drawn but not stored", draws, "step")
        )
        if not is_stored.all():
            return rows[rows >= 0]
        uses_N, last_use_N = uses_N.copy(), last_use_N.copy()
        for draw_rows, requested in self._single_draws(step, draws, survivors):
            units = _Units(self.run, step, candidate_C, uses_N, last_use_N)
            drawn = rows[draw_rows]
            self._check_draw(step, draws[draw_rows], drawn, units, requested)
            np.add.at(uses_N, drawn, 1)
            last_use_N[drawn] = step
        return rows

    def _check_ages(self, step: int, draws: np.ndarray, rows: np.ndarray) -> None:
        """Checks that ages are step - birth_step, at least 1 if fresh rollouts cannot be drawn, at
        most the limit, and in updates if the step makes several draws."""
        settings, age_N = self.run.recipe.replay, draws["age_steps"]
        births = self.run.rollouts["birth_step"][rows]
        is_right_N = (draws["step"] == step) & (age_N >= settings.anchors_fresh)
        is_right_N &= (rows < 0) | (age_N == step - births)
        if settings.max_age_steps is not None:
            is_right_N &= age_N <= settings.max_age_steps
        birth_update_N = self.run.recipe.draws_per_step * (step - age_N - 1) + 1
        is_right_N &= draws["age"] == draws["update"] - birth_update_N
        self.ages.expect_all(
            is_right_N,
            describe_row(f"step {step}", draws, "step", "age_steps", birth_step=births),
        )

    def _requested_units(self, step: int, survivors: int) -> int:
        """Computes the number of units that the recipe draws in a step from B' = `survivors`, or
        for `buffer_only` from R, the rollouts generated (an asynchronous step's nominal ones)."""
        recipe = self.run.recipe
        settings, rows = recipe.replay, self.run.rows_of_step[step]
        if not settings.replays or step <= settings.warmup_steps:
            return 0
        generated = recipe.rollouts_per_step if recipe.run.is_async else rows.stop - rows.start
        rollouts = settings.ratio * generated
        if not settings.stores_first:
            rollouts = (settings.ratio + settings.pools_fresh) * survivors
        return round(rollouts / (recipe.sampling.group_size if settings.unit == "query" else 1))

    def _single_draws(
        self, step: int, draws: np.ndarray, survivors: int
    ) -> Iterator[tuple[np.ndarray, int]]:
        """Yield the rows of each draw in the step's file, and the number of units to draw. A step
        makes one draw, or one for each update."""
        requested = self._requested_units(step, survivors)
        updates = self.run.recipe.draws_per_step
        if updates == 1:
            yield np.arange(len(draws["step"])), requested
            return
        update_N = draws["update"] - updates * (step - 1) - 1
        for update in range(updates):
            share = requested // updates + (update < requested % updates)
            yield np.flatnonzero(update_N == update), share

    def _check_draw(
        self, step: int, draws: np.ndarray, rows_D: np.ndarray, units: _Units, requested: int
    ) -> None:
        """Check one draw of `requested` units: candidates only, `_check_units`, and P; the first
        draw of a step sets effective sample size and entropy."""
        position_D = find_rows(units.candidate_C, rows_D)
        is_candidate_D = position_D >= 0
        self.units.expect_all(
            is_candidate_D,
            describe_row(f"step {step}, drawn too often or too lately", draws, "step"),
        )
        if not is_candidate_D.all():
            return
        unit_D = units.unit_C[position_D]
        drawn = unit_D[position_D == units.first_U[unit_D]]  # one entry for each drawn query
        self._check_units(step, units, unit_D, drawn, requested)
        if not len(unit_D):
            return
        probability_U = units.probability_U()
        if self.effective_sample_size is None:  # those of the distribution that is used first
            in_first_U = units.drawn_before_U == units.drawn_before_U[unit_D[0]]
            P = probability_U[in_first_U & (probability_U > 0)]
            self.effective_sample_size = float(1 / (P**2).sum())
            self.entropy = -float((P * np.log(P)).sum())
        logged_D, expected_D = draws["probability"], probability_U[unit_D]
        self.probabilities.expect_all(
            np.isclose(logged_D, expected_D, rtol=1e-9, atol=1e-300),  # sums differ by 1e-13
            describe_row(f"step {step}", draws, "probability", recomputed=expected_D),
        )

    def _check_units(
        self, step: int, units: _Units, unit_D: np.ndarray, drawn: np.ndarray, requested: int
    ) -> None:
        """Check that the `drawn` units are whole and distinct, as many as `requested` or, without
        replacement, as there are, and with `unused_first` in order; `unit_D` has each rollout's."""
        settings, drawable = self.run.recipe.replay, int(units.drawable_U.sum())
        fills_up = settings.with_replacement and drawable > 0
        expected = requested if fills_up else min(requested, drawable)
        self.counts.expect(
            len(drawn) == expected,
            f"step {step}: drew {len(drawn)} {settings.unit} unit(s), expected {expected} "
            f"(asked {requested} of {drawable} candidates)",
        )
        are_whole = np.array_equal(units.count(unit_D), units.size_U * units.count(drawn))
        are_distinct = settings.with_replacement or len(np.unique(drawn)) == len(drawn)
        self.units.expect(
            are_whole and are_distinct,
            f"step {step}: a {settings.unit} was drawn in part, or twice without replacement",
        )
        if settings.unused_first:
            unused = int((units.drawable_U & ~units.drawn_before_U).sum())
            self.units.expect(
                np.array_equal(units.drawn_before_U[drawn], np.arange(len(drawn)) >= unused),
                f"step {step}: did not draw the {unused} never drawn before all others",
            )


def priorities(run: RunFiles, settings: ReplaySection, rows: np.ndarray) -> np.ndarray:
    """Compute p of `rows`: |A| or σ_g plus ε as in the paper, 1, or by the recipe's function."""
    paper_columns = {"abs_advantage": "advantage", "group_std": "group_reward_std"}
    if settings.priority == "uniform":
        return np.ones(len(rows))
    if column := paper_columns.get(settings.priority):
        return np.abs(run.rollouts[column][rows]) + EPSILON
    function = PRIORITIES.load(settings.priority)
    epsilon = EPSILON if getattr(function, "epsilon", True) else 0.0
    if not len(rows):
        return np.zeros(0)
    names = function.columns  # type: ignore[attr-defined]
    columns = {name: run.rollouts[name][rows] for name in names}
    return np.asarray(function(columns), dtype=np.float64) + epsilon
