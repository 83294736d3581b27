"""The parts of an evaluation: benchmarks, generation cache, statistics, report, comparison.

Numpy, pyarrow and rich only; `grpo_replay.evaluate` puts them together.
"""
