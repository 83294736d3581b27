"""Rewards: the scorer, its worker processes, the built-in answer verifiers, and `grade`.

Imports `recipe`, `terminal`, `named_functions`, `types` and `errors`; never torch, and math-verify
only in the workers.
"""
