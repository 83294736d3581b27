"""The parts of an evaluation: benchmarks, generation cache, statistics, report, comparison.

Numpy, pyarrow and rich only; `evaluate` puts them together. Imports sampling and what is
below.
"""
