"""Bugs that were made somewhere, or missed once, each with a test of the default suite that fails
on it. `old` occurs exactly once in the file."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Known:
    """`new` in place of `old` in `path` is a bug; `test` fails on it."""

    name: str
    path: str
    old: str
    new: str
    test: str


TRAINER = "grpo_replay/training/trainer.py"
ASYNCHRONOUS = "grpo_replay/training/asynchronous.py"
BUFFER = "grpo_replay/replay/entry_store.py"
COMPOSE = "grpo_replay/replay/compose.py"
PRIORITIES = "grpo_replay/replay/priorities.py"
LOSS = "grpo_replay/replay/loss.py"
BATCH = "grpo_replay/replay/batch.py"
ADVANTAGES = "grpo_replay/replay/advantages.py"
RESUMING = "grpo_replay/training/resuming.py"
BOXED = "grpo_replay/rewards/boxed.py"
ARRIVALS = "grpo_replay/collection/arrivals.py"
FROZEN = (
    "tests/training/test_trainer.py::"
    "test_a_step_trains_on_every_fresh_survivor_and_on_the_draw_with_frozen_values"
)
BOXED_TABLE = (
    "tests/rewards/test_boxed.py::"
    "test_the_verdicts_of_the_table_are_right_but_for_those_that_are_known"
)
BY_HAND = "tests/replay/test_loss.py::test_clipped_surrogate_by_hand"

KNOWN = (
    # The optimizer step
    Known(
        "every step splits its batch alike", TRAINER,
        "stream(self.recipe.run.seed, step, SPLIT_STREAM)",
        "stream(self.recipe.run.seed, SPLIT_STREAM)",
        FROZEN,
    ),
    Known(
        "every step draws alike", TRAINER,
        "stream(seed, step, DRAW_STREAM)", "stream(seed, DRAW_STREAM)",
        "tests/training/test_trainer.py::test_each_step_draws_with_a_random_stream_of_its_own",
    ),
    Known(
        "the learning rate of the step before", TRAINER,
        "self.parts.engine.begin_step(step)", "self.parts.engine.begin_step(max(step - 1, 1))",
        "tests/training/test_loss_options.py::"
        "test_updates_are_made_at_the_learning_rate_of_their_step",
    ),
    Known(
        "behaviour log-probs recomputed by the current policy", TRAINER,
        "        rows = train_rows(rollouts, reference, self.recipe.loss, longest)\n",
        "        plain = [logprob_row(r.prompt_token_ids, r.completion_token_ids)"
        " for r in rollouts]\n"
        "        now = engine.logprobs(plain if is_main else None)\n"
        "        ids = [r.rollout_id for r in rollouts]\n"
        "        rollouts = with_behavior_logprobs(rollouts, dict(zip(ids, now)))\n"
        "        rows = train_rows(rollouts, reference, self.recipe.loss, longest)\n",
        FROZEN,
    ),
    Known(
        "the current policy is the old one of its own ratio", LOSS,
        "    log_ratios_C = logprobs_C - behavior_logprobs_C\n    exponents_C",
        "    log_ratios_C = logprobs_C - logprobs_C.detach()\n    exponents_C",
        BY_HAND,
    ),
    Known(
        "clip bounds swapped", LOSS,
        "1.0 - settings.epsilon, 1.0 + settings.epsilon_high",
        "1.0 - settings.epsilon_high, 1.0 + settings.epsilon",
        BY_HAND,
    ),
    Known(
        "dual clip from the wrong side", LOSS,
        "torch.maximum(surrogate_C, floor_C)", "torch.minimum(surrogate_C, floor_C)", BY_HAND,
    ),
    Known(
        "dual clip counted for every advantage", LOSS,
        "clipped_C | (negative_C & (ratios_C > settings.dual_clip))",
        "clipped_C | (ratios_C > settings.dual_clip)",
        BY_HAND,
    ),
    Known(
        "the KL estimator of the reverse direction", LOSS,
        "(reference_logprobs_C - logprobs_C).clamp", "(logprobs_C - reference_logprobs_C).clamp",
        "tests/replay/test_loss.py::test_kl_k3_by_hand",
    ),
    Known(
        "a sequence ratio without the geometric mean", LOSS,
        "return _reduce_per_rollout(torch.mean", "return _reduce_per_rollout(torch.sum",
        "tests/replay/test_loss.py::"
        "test_a_sequence_ratio_is_the_geometric_mean_of_its_tokens_ratios_by_hand",
    ),
    Known(
        "advantages centred again over the mixed batch", BATCH,
        "                loss_coefficient(rollout, settings),\n",
        "                loss_coefficient(rollout, settings)\n"
        "                - float(np.mean([loss_coefficient(r, settings) for r in rollouts])),\n",
        "tests/replay/test_batch.py::"
        "test_train_rows_carry_frozen_advantages_and_the_mini_batch_denominator",
    ),
    Known(
        "the denominator counts the fresh half of the batch", BATCH,
        "max(int(lengths_N.sum()), 1)", "max(int(lengths_N[: (count + 1) // 2].sum()), 1)",
        "tests/replay/test_loss.py::test_aggregations_of_a_mini_batch_by_hand",
    ),
    Known(
        "token mean of sequence means", BATCH,
        "np.full(count, 1.0 / max(int(lengths_N.sum()), 1))",
        "1.0 / (count * np.maximum(lengths_N, 1))",
        "tests/replay/test_loss.py::test_token_weights_by_hand",
    ),
    Known(
        "AsymRE shifted the other way", BATCH,
        "rollout.group_reward_mean + shift",
        "rollout.group_reward_mean - shift",
        "tests/replay/test_batch.py::test_train_rows_of_asymre_are_reward_minus_shifted_group_mean",
    ),
    # Advantages
    Known(
        "sample standard deviation", ADVANTAGES,
        'rewards.size if std == "population" else', 'rewards.size if std == "sample" else',
        "tests/replay/test_advantages.py::test_closed_forms_hold_up_to_epsilon",
    ),
    Known(
        "signal decided by a tolerance", ADVANTAGES,
        "if (rewards == rewards[0]).all():", "if rewards.std() < 1e-4:",
        "tests/replay/test_advantages.py::"
        "test_signal_is_decided_by_equality_and_not_by_the_size_of_the_difference",
    ),
    # The buffer
    Known(
        "eviction by age only when the buffer is full", BUFFER,
        "if self.settings.max_age_steps is None:",
        "if self.settings.max_age_steps is None or len(self) < self.settings.capacity_rollouts:",
        "tests/replay/test_replay_buffer.py::"
        "test_age_is_bounded_by_step_minus_birth_whether_or_not_the_buffer_is_full",
    ),
    Known(
        "age in mini-batches of a step of two", BUFFER,
        'now - self._columns["birth_step"] > ', '2 * (now - self._columns["birth_step"]) > ',
        "tests/replay/test_replay_buffer.py::"
        "test_age_is_bounded_by_step_minus_birth_whether_or_not_the_buffer_is_full",
    ),
    Known(
        "one step too old is allowed", BUFFER,
        "return self._evict_born_before(step, step + 1)",
        "return self._evict_born_before(step, step)",
        "tests/replay/test_replay_buffer.py::"
        "test_evict_ahead_removes_rollouts_too_old_for_the_next_step",
    ),
    Known(
        "a draw removes", BUFFER,
        "        return Draw(\n",
        "        self._remove(np.isin(np.arange(stored), picks.indices), step)\n"
        "        return Draw(\n",
        "tests/replay/test_replay_buffer.py::test_a_draw_removes_nothing_and_records_each_use",
    ),
    Known(
        "capacity evicts the newest", BUFFER,
        "self._remove(np.arange(len(self)) < excess, step)",
        "self._remove(np.arange(len(self)) >= len(self) - excess, step)",
        "tests/replay/test_replay_buffer.py::test_capacity_is_first_in_first_out_and_counted",
    ),
    Known(
        "priority of the signed advantage", PRIORITIES,
        'np.abs(columns["advantage"])',
        'np.maximum(columns["advantage"], 0.0)',
        "tests/replay/test_draw_law.py::test_priorities_by_hand",
    ),
    Known(
        "the priority exponent is ignored", PRIORITIES,
        "exponent * (log_priority_N - largest)", "log_priority_N - largest",
        "tests/replay/test_draw_law.py::test_probabilities_ess_and_entropy_by_hand",
    ),
    Known(
        "a query's priority is the sum of its members'", "grpo_replay/replay/priorities.py",
        "np.add.reduceat(candidates.priority_N, starts_Q) / sizes_Q",
        "np.add.reduceat(candidates.priority_N, starts_Q)",
        "tests/replay/test_draw_law.py::"
        "test_the_buffers_query_draws_follow_the_mean_priority_of_members",
    ),
    # Composition
    Known(
        "fresh-anchored inserts before it draws", COMPOSE,
        'stores_first = settings.composition == "buffer_only"', "stores_first = True",
        "tests/replay/test_compose.py::test_fresh_anchored_step_by_step",
    ),
    Known(
        "the warm-up is a step short", COMPOSE,
        "step <= settings.warmup_steps", "step < settings.warmup_steps",
        "tests/replay/test_compose.py::"
        "test_warm_up_trains_on_all_fresh_and_fills_the_buffer",
    ),
    Known(
        "the draw counts dropped rollouts", COMPOSE,
        "draw_count(settings, buffer.group_size, len(fresh))",
        "draw_count(settings, buffer.group_size, generated)",
        "tests/replay/test_compose.py::test_fresh_anchored_step_by_step",
    ),
    Known(
        "half a rollout is cut off", COMPOSE,
        "else round(rollouts)\n", "else int(rollouts)\n",
        "tests/replay/test_compose.py::test_counts_by_hand",
    ),
    Known(
        "several uses of one fresh rollout in a pool draw count once", COMPOSE,
        "uses = Counter(entry.rollout_id for entry in batch.draw.entries)",
        "uses = Counter({entry.rollout_id for entry in batch.draw.entries})",
        "tests/replay/test_compose.py::"
        "test_pool_counts_every_use_of_a_fresh_rollout_that_is_drawn_again",
    ),
    Known(
        "the updates of a step have the largest share each, and the last the rest", COMPOSE,
        "update_N=np.repeat(np.arange(updates), [len(draw.entries) for draw in draws])",
        "update_N=np.arange(count) // -(-count // updates)",
        "tests/replay/test_compose.py::"
        "test_a_step_of_several_draws_makes_them_one_after_the_other_and_splits_the_batch_evenly",
    ),
    # Asynchronous collection
    Known(
        "partial rollouts in the log-prob gap", ASYNCHRONOUS,
        "(rollout.policy_version, rollout.policy_version_end) == (version, version)",
        "rollout.policy_version_end == version",
        "tests/training/test_metrics.py::"
        "test_an_asynchronous_gap_is_measured_where_the_present_policy_sampled_every_token",
    ),
    Known(
        "cancelled a step too late", ASYNCHRONOUS,
        "intake.cancel_stale(version + 1)", "intake.cancel_stale(version)",
        "tests/training/test_async_runs.py::test_groups_too_old_for_the_next_step_are_cancelled",
    ),
    Known(
        "a rank without an intake pushes repeated steps", ASYNCHRONOUS,
        "if self._is_live and is_due:", "if is_due:",
        "tests/training/test_async_steps.py::"
        "test_servers_that_hold_another_version_get_the_policy_before_the_first_step",
    ),
    Known(
        "the newest groups first", ARRIVALS,
        "young[-count:] if newest else young[:count]",
        "young[:count] if newest else young[-count:]",
        "tests/collection/test_arrivals.py::test_the_oldest_finished_groups_come_first",
    ),
    Known(
        "birth a step too early", ARRIVALS,
        "return 1 + min(row.spans", "return min(row.spans",
        "tests/collection/test_arrivals.py::test_the_age_limit_is_on_the_oldest_version_of_a_group",
    ),
    Known(
        "a resume goes on at the smallest place missing", ARRIVALS,
        "for n in range(cursor) if n not in seen], cursor", "for n in range(0)], cursor",
        "tests/collection/test_arrivals.py::"
        "test_a_resume_goes_on_with_the_outstanding_places_not_the_smallest",
    ),
    Known(
        "the same group twice", ARRIVALS,
        "        self._seen.add(record.position)\n", "",
        "tests/collection/test_arrivals.py::test_a_second_copy_of_a_group_is_recognised",
    ),
    Known(
        "partial rollouts kept against the recipe", ARRIVALS,
        'return "stale" if drops_partial and is_partial(rollout) else "inserted"',
        'return "inserted"',
        "tests/collection/test_assembly.py::"
        "test_partial_rollouts_are_kept_or_dropped_as_the_recipe_says_and_counted",
    ),
    Known(
        "behaviour log-probs that are not the sampler's", TRAINER,
        "{rollout.rollout_id: rollout.sampler_logprobs for rollout in generated}",
        "{rollout.rollout_id: 0 * rollout.sampler_logprobs for rollout in generated}",
        "tests/training/test_async_runs.py::"
        "test_behaviour_logprobs_are_the_samplers_and_never_recomputed",
    ),
    Known(
        "one step ahead too few", "grpo_replay/collection/intake.py",
        "min(max_ahead_steps + version + 1, steps)", "min(max_ahead_steps + version, steps)",
        "tests/collection/test_admission.py::test_the_limit_by_hand",
    ),
    Known(
        "closed rollouts stay in flight", "grpo_replay/collection/arrivals.py",
        "        self.queued = self.queued.minus(amount)\n", "",
        "tests/collection/test_ledger.py::test_a_balance_by_hand",
    ),
    Known(
        "a step is journalled under another number", "grpo_replay/collection/intake.py",
        "Step(step, self.arrivals.records,", "Step(step - 1, self.arrivals.records,",
        "tests/collection/test_intake.py::test_the_journal_alone_repeats_every_selection",
    ),
    Known(
        "recorded steps are repeated under another recipe", RESUMING,
        "    if last > step:\n",
        "    if last > step + 99:\n",
        "tests/training/test_journal_rules.py::"
        "test_steps_after_the_checkpoint_are_repeated_with_their_own_updates",
    ),
    Known(
        "one recorded step is repeated under another recipe", RESUMING,
        "    if last > step:\n", "    if last > step + 1:\n",
        "tests/training/test_journal_rules.py::"
        "test_steps_after_the_checkpoint_are_repeated_with_their_own_updates",
    ),
    # Around them
    Known(
        "completions of another sampler from the cache", "grpo_replay/evaluation/cache.py",
        "    if sampling.backend not in SAMPLERS.names:\n", "    if False:\n",
        "tests/evaluation/test_eval_command.py::"
        "test_an_edited_sampler_of_the_user_has_another_generations_folder",
    ),
    Known(
        "the greedy completion in the group of the sampled ones",
        "grpo_replay/evaluation/evaluate.py",
        'return f"{number} greedy" if planned.greedy else number', "return number",
        "tests/evaluation/test_evaluation_keys.py::"
        "test_the_greedy_completion_is_in_no_group_of_sampled_ones",
    ),
    Known(
        "a short answer with finish reason length", "grpo_replay/sampling/vllm_requests.py",
        'finish_reason == "length" and len(token_ids) == request.max_tokens',
        'finish_reason == "length"',
        "tests/sampling/test_vllm_parts.py::test_an_answer_that_was_cut_short_is_refused",
    ),
    Known(
        "the interval of all problems solved has no width", "grpo_replay/evaluation/statistics.py",
        "with_both = [with_unsolved_and_solved(benchmark_N) for benchmark_N in values_N]",
        "with_both = list(values_N)",
        "tests/evaluation/test_statistics.py::"
        "test_none_of_thirty_problems_solved_leaves_a_tenth_possible",
    ),
    Known(
        "LoRA merged in bfloat16", "grpo_replay/engine/weights.py",
        "a, b = (tensor.float() for tensor in adapters)\n"
        "        merged = torch.addmm(weight.float(), b, a, alpha=self.scaling)",
        "a, b = adapters\n"
        "        merged = weight + self.scaling * (b @ a)",
        "tests/engine/test_lora.py::test_adapters_are_merged_in_fp32_and_rounded_once",
    ),
    Known(
        "a run without a step is not resumed", RESUMING,
        "step = read_state(checkpoint).step if checkpoint else 0",
        "step = read_state(checkpoint).step if checkpoint else 1",
        "tests/training/test_resuming.py::test_a_run_that_ended_within_its_first_step_starts_again",
    ),
    Known(
        "a fresh rollout that a pool draws in shadow counts as replayed",
        "grpo_replay/training/metrics.py",
        "probe), batch.draw.ages > 0", "probe), batch.draw.ages >= 0",
        "tests/training/test_metrics.py::"
        "test_in_shadow_what_a_pool_draws_of_the_fresh_rollouts_is_not_replayed",
    ),
    Known(
        "rank 0 does not say that it evaluates", "grpo_replay/training/run_evaluation.py",
        'if self.comm.is_main:\n            self.observer.on_status(f"evaluating',
        'if not self.comm.is_main:\n            self.observer.on_status(f"evaluating',
        "tests/training/test_run_files.py::"
        "test_an_observer_gets_the_report_of_each_evaluation",
    ),
    Known(
        "another process may have made one step more", RESUMING,
        ".step > start.state.step:", ".step > start.state.step + 1:",
        "tests/training/test_resuming.py::"
        "test_a_run_that_another_process_took_on_by_one_step_meanwhile_is_refused",
    ),
    Known(
        "a decimal may be a quarter of a digit further below its number", BOXED,
        "bool(-sympy.Rational(1, 2) <= error) and bool(error < 1)",
        "bool(-sympy.Rational(1, 4) <= error) and bool(error < sympy.Rational(5, 4))",
        BOXED_TABLE,
    ),
    Known(
        "a decimal may be a quarter of a digit further above its number", BOXED,
        "bool(-sympy.Rational(1, 2) <= error) and bool(error < 1)",
        "bool(-sympy.Rational(3, 4) <= error) and bool(error < sympy.Rational(3, 4))",
        BOXED_TABLE,
    ),
    Known(
        "the interval of an accuracy leaves out the accuracy",
        "grpo_replay/evaluation/statistics.py",
        "return min(share, max(0.0, low)), max(share, high)", "return max(0.0, low), high",
        "tests/evaluation/test_statistics.py::"
        "test_the_interval_of_an_accuracy_has_the_accuracy_in_it",
    ),
    Known(
        "sign flips weight benchmarks by their problems", "grpo_replay/evaluation/statistics.py",
        "np.concatenate([values_N / len(values_N) for values_N in differences])",
        "np.concatenate(differences)",
        "tests/evaluation/test_statistics.py::"
        "test_sign_flips_of_the_mean_weight_benchmarks_equally",
    ),
    Known(
        "the frontier keeps the worse of two points of equal cost",
        "grpo_replay/lab/report/costs.py",
        "points.sort(key=lambda point: (point[0], -point[1]))",
        "points.sort(key=lambda point: (point[0], point[1]))",
        "tests/lab/report/test_report.py::"
        "test_of_evaluations_of_equal_cost_the_best_alone_is_on_the_frontier",
    ),
    Known(
        "the tokens of a server are those of its busiest engine",
        "grpo_replay/sampling/server/routes.py",
        "return sum(map(float, counts))", "return max(map(float, counts))",
        "tests/sampling/server/test_server_requests.py::"
        "test_the_tokens_of_a_server_are_those_of_all_its_engines",
    ),
)  # fmt: skip
