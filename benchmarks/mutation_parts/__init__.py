"""Parts of `benchmarks/mutation_check.py`."""
