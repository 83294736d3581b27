"""Mutants that no test can notice, and why: (path, old lines, new lines, reason)."""

_WHY_BEGUN = "# else every record would read the rest"

EQUIVALENT: tuple[tuple[str, str, str, str], ...] = (
    (
        "grpo_replay/integrations/trl_rows.py",
        '"old_per_token_logps": numbers([rollout.behavior_logprobs for rollout in rollouts], 0.0),',
        '"old_per_token_logps": numbers([rollout.behavior_logprobs for rollout in rollouts], '
        "(1.0)),",
        "padding, which completion_mask leaves out",
    ),
    (
        "grpo_replay/replay/advantages.py",
        "if (rewards == rewards[0]).all():", "if (rewards == rewards[(1)]).all():",
        "all rewards are equal to the first exactly if they are equal to the second",
    ),
    (
        "grpo_replay/training/asynchronous.py",
        "self._unchecked_steps = UNCHECKED_STEPS - 1",
        "self._unchecked_steps = (UNCHECKED_STEPS + 1)",
        "the first step is checked from UNCHECKED_STEPS - 1 on, and then counts from 0",
    ),
    (
        "grpo_replay/training/rollout_source.py",
        "if TYPE_CHECKING:", "if (not TYPE_CHECKING):",
        "the names are only read in annotations, and importing them makes no circle",
    ),
    (
        "grpo_replay/training/opening.py",
        "self._early_records = MemoryHandler(10_000, flushLevel=logging.CRITICAL + 1)",
        "self._early_records = MemoryHandler((10001), flushLevel=logging.CRITICAL + 1)",
        "more log lines than a start writes",
    ),
    (
        "grpo_replay/collection/collector_process.py",
        "socket.setsockopt(zmq.LINGER, 2000)", "socket.setsockopt(zmq.LINGER, (2001))",
        "a time limit, in milliseconds",
    ),
    (
        "grpo_replay/collection/messages.py",
        "generated_tokens: int = 0", "generated_tokens: int = (1)",
        "a collector's report says the number, and nobody reads it in the empty one",
    ),
    (
        "grpo_replay/collection/journal.py",
        "SEGMENT_BYTES = 64 * 2**20", "SEGMENT_BYTES = 64 * (3)**20",
        "where one file ends and the next begins",
    ),
    (
        "grpo_replay/collection/journal.py",
        "SEGMENT_BYTES = 64 * 2**20", "SEGMENT_BYTES = 64 * 2**(21)",
        "where one file ends and the next begins",
    ),
    (
        "grpo_replay/training/synchronous.py",
        'return {"sampler/policy_version": record.generated[0].policy_version}',
        'return {"sampler/policy_version": record.generated[(1)].policy_version}',
        "one policy samples all rollouts of a synchronous step",
    ),
    (
        "grpo_replay/collection/journal.py",
        "if last.stat().st_size > good:", "if (last.stat().st_size >= good):",
        "a file that is cut to its own length stays as it is",
    ),
    (
        "grpo_replay/collection/messages.py",
        "sent: float = 0.0", "sent: float = (1.0)",
        "the link gives its first report a time, and every other one comes with its own",
    ),
    (
        "grpo_replay/replay/advantages.py",
        "return GroupAdvantage(mean=float(rewards[0]), std=0.0, advantages_G=None)",
        "return GroupAdvantage(mean=float(rewards[(1)]), std=0.0, advantages_G=None)",
        "all rewards are equal there",
    ),
    (
        "grpo_replay/replay/snapshot.py",
        "_CHUNK_ROLLOUTS = 4096 # rows converted at once, and rows per row group: limits memory",
        "_CHUNK_ROLLOUTS = (4097) # rows converted at once, and rows per row group: limits memory",
        "limits memory alone",
    ),
    (
        "grpo_replay/collection/collector.py",
        "self._cursor = 0", "self._cursor = (1)",
        "Hello sets it before anything is sampled",
    ),
    (
        "grpo_replay/collection/collector_process.py",
        "context.term()", "pass",
        "the process ends right after it",
    ),
    (
        "grpo_replay/replay/priorities.py",
        "finite = np.where(self.weight_N > 0, self.log_weight_N, 0.0)",
        "finite = np.where(self.weight_N > 0, self.log_weight_N, (1.0))",
        "it is multiplied by a weight of 0",
    ),
    (
        "grpo_replay/replay/priorities.py",
        "if count <= 0 or law.total == 0:", "if (count < 0) or law.total == 0:",
        "0 random numbers find 0 rollouts",
    ),
    (
        "grpo_replay/replay/entry_store.py",
        "if excess <= 0:", "if (excess < 0):",
        "dropping the oldest 0 rollouts drops none",
    ),
    (
        "grpo_replay/replay/replay_buffer.py",
        "group_id, size = Counter(entry.group_id for entry in fresh).most_common(1)[0]",
        "group_id, size = Counter(entry.group_id for entry in fresh).most_common((2))[0]",
        "the first of the two most common is the most common one",
    ),
    (
        "grpo_replay/collection/messages.py",
        "return values.astype(dtype, copy=False).tobytes()",
        "return values.astype(dtype, copy=(True)).tobytes()",
        "the bytes of a copy are the same",
    ),
    (
        "grpo_replay/collection/journal.py",
        "is_begun = any(data[offset : offset + _HEADER.size]) " + _WHY_BEGUN,
        "is_begun = any((data[offset + 1:offset + _HEADER.size])) " + _WHY_BEGUN,
        "it saves the count of zeros, which decides",
    ),
    (
        "grpo_replay/collection/journal.py",
        "is_begun = any(data[offset : offset + _HEADER.size]) " + _WHY_BEGUN,
        "is_begun = any((data[offset:offset + _HEADER.size - 1])) " + _WHY_BEGUN,
        "it saves the count of zeros, which decides",
    ),
    (
        "grpo_replay/sampling/decoding.py",
        "_TOKENS = (3, 5, 2)", "_TOKENS = ((4), 5, 2)",
        "lengths of made-up completions; others serve as well",
    ),
    (
        "grpo_replay/lab/inspection/compute.py",
        'valid = (tokens > 0) & np.isfinite(used["log_ratio_mean"])',
        'valid = ((tokens >= 0)) & np.isfinite(used["log_ratio_mean"])',
        "a mean over no tokens is not finite",
    ),
    (
        "grpo_replay/collection/journal.py",
        "folder.mkdir(parents=True, exist_ok=True)", "folder.mkdir(parents=(False), exist_ok=True)",
        "it lies in the folder of a run that is there",
    ),
    (
        "grpo_replay/lab/report/report_figures.py",
        'axes.plot(even["mu"], 1.0, "o", color=colour, markersize=4)',
        'axes.plot(even["mu"], 1.0, "o", color=colour, markersize=(5))',
        "the size of a dot",
    ),
)  # fmt: skip
