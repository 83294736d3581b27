"""Checks of draws/: candidates, number of draws, ages and first-draw probabilities."""

import numpy as np

from grpo_replay.lab.verification.run_files import Check, Columns, RunFiles, Tally, queries
from grpo_replay.recipe import ReplaySection
from grpo_replay.recipe.open_lists import PRIORITIES
from grpo_replay.replay.priorities import EPSILON

_LOGGED_AS = {"completion_tokens": "completion_token_ids"}  # RunFiles has the lengths of lists
_COUNTS = {
    "fresh_anchored": "round(r B')", "pool": "round((1 + r) B')", "buffer_only": "round(r R)",
}  # fmt: skip
_PROBABILITY_TOLERANCE = 1e-9  # relative; float64 sums in different orders differ by 1e-13
_SMALLEST = 1e-300  # below it, float64 has fewer digits than the tolerance asks for


class DrawChecks:
    """The checks of a run's draws. `check` is called for every step with the candidates."""

    def __init__(self, run: RunFiles) -> None:
        self.run = run
        self.settings = run.recipes.first.replay  # those of the step being checked
        self.row_of = {int(i): row for row, i in enumerate(run.rollouts["rollout_id"])}
        self.effective_sample_size: float | None = None  # of the step checked last
        self.entropy: float | None = None  # likewise, nats
        youngest, limit = _youngest(self.settings), self.settings.max_age_steps
        oldest = "any" if limit is None else limit
        self.ages = Tally("ages", f"step - birth_step, from {youngest} to {oldest}")
        compositions = (each.replay.composition for each in run.recipes.recipes)
        rules = " or ".join(dict.fromkeys(_COUNTS[each] for each in compositions))
        self.counts = Tally(
            "draw counts",
            f"{rules} in units; without replacement, at most all candidates of p > 0",
        )
        self.stored = Tally(
            "stored when drawn", "each drawn rollout was in the buffer (or pool) at that step"
        )
        self.units = Tally("drawn units", "whole queries, none twice in a draw without replacement")
        self.probabilities = Tally("probabilities", "P = p^alpha / sum p^alpha recomputed")

    def check(
        self, step: int, candidates: list[int], survivors: int, used: np.ndarray
    ) -> list[int]:
        """Check the draw of one step from `candidates` (rows, oldest first). Returns the drawn rows
        that exist. `survivors` is B'; `used[row]` is True for rows drawn before."""
        self.settings = self.run.recipe_at(step).replay
        self.effective_sample_size = self.entropy = None
        draws = self.draws(step)
        units = self._units(candidates)
        asked = self._asked(step, survivors)
        rows = [self.row_of.get(int(i), -1) for i in draws["rollout_id"]]
        known = self._check_known(step, draws, rows, set(candidates))
        self._check_ages(step, draws, rows)
        if not known:
            return [row for row in rows if row >= 0]
        used, log_weight_U = used.copy(), self._log_weights(units)
        for share, of_draw in self._single_draws(step, draws, asked):
            mine = [rows[i] for i in of_draw]
            own = {name: values[of_draw] for name, values in draws.items()}
            self._check_draw(step, own, mine, units, log_weight_U, share, used)
            used[mine] = True
        return rows

    def _single_draws(self, step: int, draws: Columns, asked: int) -> list[tuple[int, np.ndarray]]:
        """For each draw of the step the units asked for, and the rows of its file: one draw, or one
        for each update."""
        updates = self.run.draws_per_step(step)
        if updates == 1:
            return [(asked, np.arange(len(draws["step"])))]
        update_N = draws.get("update", np.zeros(0, np.int64)) - updates * (step - 1) - 1
        in_order = np.isin(update_N, range(updates)).all() and (np.diff(update_N) >= 0).all()
        self.counts.expect(
            bool(in_order),
            f"step {step}: its draws are not those of updates {updates * (step - 1) + 1} to "
            f"{updates * step}, in this order",
        )
        return [
            (asked // updates + (each < asked % updates), np.flatnonzero(update_N == each))
            for each in range(updates)
        ]

    def _check_draw(
        self,
        step: int,
        draws: Columns,
        rows: list[int],
        units: list[list[int]],
        log_weight_U: np.ndarray,
        asked: int,
        used: np.ndarray,
    ) -> None:
        """Check one draw of `asked` units. Those of weight 0 are never drawn."""
        drawn = self._split_into_units(step, rows, units)
        drawable_U = np.isfinite(log_weight_U)
        drawable = int(drawable_U.sum())
        refills = self.settings.with_replacement and drawable > 0
        expected = asked if refills else min(asked, drawable)
        self.counts.expect(
            len(drawn) == expected,
            f"step {step}: drew {len(drawn)} {self.settings.unit} unit(s), expected {expected} "
            f"(asked {asked} of {drawable} candidates)",
        )
        for members, picked in self._distributions(step, units, drawable_U, drawn, used):
            self._check_probabilities(step, draws, units, log_weight_U, members, picked)

    def draws(self, step: int) -> Columns:
        """The columns of the step's draws/ file, empty if there is none."""
        return self.run.draws_of_step.get(step, _NO_DRAWS)

    def results(self) -> list[Check]:
        tallies = (self.stored, self.counts, self.units, self.ages, self.probabilities)
        return [tally.result() for tally in tallies]

    def _asked(self, step: int, survivors: int) -> int:
        """Number of units to draw according to the recipe."""
        settings = self.settings
        if not settings.replays or step <= settings.warmup_steps:
            return 0
        recipe = self.run.recipe_at(step)
        if settings.stores_first:
            rollouts = settings.ratio * self._generated(step)
        else:
            rollouts = (settings.ratio + settings.pools_fresh) * survivors
        per_unit = recipe.sampling.group_size if settings.unit == "query" else 1
        return round(rollouts / per_unit)

    def _generated(self, step: int) -> int:
        """R: what the step generated. An asynchronous step draws as many whatever has arrived."""
        recipe = self.run.recipe_at(step)
        if recipe.run.is_async:
            return recipe.rollouts_per_step
        rows = self.run.rows_of_step.get(step, slice(0, 0))
        return rows.stop - rows.start

    def _units(self, candidates: list[int]) -> list[list[int]]:
        if self.settings.unit == "query":
            return queries(candidates, self.run.rollouts)
        return [[row] for row in candidates]

    def _check_known(
        self, step: int, draws: Columns, rows: list[int], candidates: set[int]
    ) -> bool:
        ids = draws["rollout_id"]
        known_N = np.array([row in candidates for row in rows], dtype=bool)
        self.stored.expect_all(
            known_N, lambda i: f"step {step}: rollout {ids[i]} was drawn but not stored then"
        )
        return bool(known_N.all())

    def _check_ages(self, step: int, draws: Columns, rows: list[int]) -> None:
        row_N, age_N, ids = np.array(rows, np.int64), draws["age_steps"], draws["rollout_id"]
        births = self.run.rollouts["birth_step"][row_N]
        right_N = (draws["step"] == step) & (age_N >= _youngest(self.settings))
        right_N &= (row_N < 0) | (age_N == step - births)
        if self.settings.max_age_steps is not None:
            right_N &= age_N <= self.settings.max_age_steps
        if "update" in draws:
            first = self.run.draws_per_step(step) * (step - age_N - 1) + 1
            right_N &= draws["age_updates"] == draws["update"] - first
        self.ages.expect_all(
            right_N,
            lambda i: (
                f"step {step}, rollout {ids[i]}: step {draws['step'][i]}, age_steps {age_N[i]}, "
                f"born at step {births[i]}"
            ),
        )

    def _split_into_units(self, step: int, rows: list[int], units: list[list[int]]) -> list[int]:
        """Indices of the drawn units, in the order drawn."""
        unit_of = {row: index for index, unit in enumerate(units) for row in unit}
        drawn, position = [], 0
        while position < len(rows):
            unit = units[unit_of[rows[position]]]
            together = rows[position : position + len(unit)] == unit
            self.units.expect(
                together,
                f"step {step}: rollout {self.run.rollouts['rollout_id'][rows[position]]} was "
                f"drawn without the other rollouts of its query, {len(unit)} in all",
            )
            drawn.append(unit_of[rows[position]])
            position += len(unit) if together else 1
        if not self.settings.with_replacement:
            self.units.expect(len(set(drawn)) == len(drawn), f"step {step}: a unit was drawn twice")
        return drawn

    def _distributions(
        self,
        step: int,
        units: list[list[int]],
        drawable_U: np.ndarray,
        drawn: list[int],
        used: np.ndarray,
    ) -> list[tuple[list[int], list[int]]]:
        """The units of each distribution that the step drew from, with its draws in order. One over
        all units, or with `unused_first` one over the units never drawn and one over the others.
        Indices into `units`."""
        if not self.settings.unused_first:
            return [(list(range(len(units))), drawn)]
        old = {index for index, unit in enumerate(units) if used[unit].any()}
        never = [index for index in range(len(units)) if index not in old]
        left = int(drawable_U[never].sum())
        first = [index for index in drawn if index not in old]
        in_order = drawn[: len(first)] == first
        self.units.expect(
            in_order and len(first) == min(len(drawn), left),
            f"step {step}: drew {len(drawn) - len(first)} used {self.settings.unit} unit(s) "
            f"while {left - len(first)} never drawn remained, or before those",
        )
        return [(never, first), (sorted(old), drawn[len(first) :] if in_order else [])]

    def _check_probabilities(
        self,
        step: int,
        draws: Columns,
        units: list[list[int]],
        log_weight_U: np.ndarray,
        members: list[int],
        drawn: list[int],
    ) -> None:
        """Check probabilities against the distribution over the units `members`."""
        if not drawn:
            return
        weight_M = np.exp(log_weight_U[members] - log_weight_U[members].max())
        probability_M = weight_M / weight_M.sum()
        if self.effective_sample_size is None:
            self.effective_sample_size = float(1 / (probability_M**2).sum())
            some_M = probability_M[probability_M > 0]
            self.entropy = -float((some_M * np.log(some_M)).sum())
        place = {unit: position for position, unit in enumerate(members)}
        expected_of = {row: probability_M[place[unit]] for unit in drawn for row in units[unit]}
        rows = (self.row_of[int(i)] for i in draws["rollout_id"])
        # Rows that are not there were drawn from the other distribution.
        expected_N = np.array([expected_of.get(row, np.nan) for row in rows])
        found_N, here = draws["probability"], np.flatnonzero(~np.isnan(expected_N))
        near_N = np.abs(found_N - expected_N) <= _PROBABILITY_TOLERANCE * expected_N + _SMALLEST
        self.probabilities.expect_all(
            near_N[here],
            lambda i: (
                f"step {step}, rollout {draws['rollout_id'][here[i]]}: probability "
                f"{found_N[here[i]]!r}, recomputed {expected_N[here[i]]!r}"
            ),
        )

    def _log_weights(self, units: list[list[int]]) -> np.ndarray:
        """ln p^α of each unit, p the mean over its rollouts; -inf where p is 0 and α is not."""
        exponent = self.settings.priority_exponent
        if exponent == 0 or not units:
            return np.zeros(len(units))
        p_N = self.priorities(sorted(row for unit in units for row in unit))
        if self.settings.unit == "query":
            p_U = np.array([p_N[unit].mean() for unit in units])
        else:
            p_U = p_N[[unit[0] for unit in units]]
        with np.errstate(divide="ignore"):
            return exponent * np.log(p_U)

    def priorities(self, rows: list[int]) -> np.ndarray:
        """p of the rollouts `rows`, NaN for the others: |A| and σ_g as the paper has them, or the
        function that the recipe names."""
        logged, settings = self.run.rollouts, self.settings
        p_N = np.full(len(logged["advantage"]), np.nan)
        known = {"abs_advantage": "advantage", "group_std": "group_reward_std"}
        if not rows:
            return p_N
        if settings.priority == "uniform":
            p_N[rows] = 1.0
        elif settings.priority in known:
            p_N[rows] = np.abs(logged[known[settings.priority]][rows].astype(np.float64)) + EPSILON
        else:
            function = PRIORITIES.load(settings.priority)
            names = {name: _LOGGED_AS.get(name, name) for name in function.columns}  # type: ignore[attr-defined]
            values = function({name: _column(logged[at][rows]) for name, at in names.items()})
            adds = EPSILON if getattr(function, "epsilon", True) else 0.0
            p_N[rows] = np.asarray(values, dtype=np.float64) + adds
        return p_N


def _column(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float64) if values.dtype.kind == "f" else values


def _youngest(settings: ReplaySection) -> int:
    return 1 if settings.anchors_fresh else 0


_NO_DRAWS: Columns = {
    **dict.fromkeys(("step", "rollout_id", "age_steps", "tokens"), np.zeros(0, np.int64)),
    **dict.fromkeys(("probability", "clip_fraction", "ratio_mean"), np.zeros(0)),
    **dict.fromkeys(("ratio_max", "approx_kl", "entropy"), np.zeros(0)),
}
