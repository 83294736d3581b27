"""Rewards: the scorer, its worker processes, and the built-in answer verifiers.

Imports `recipe`, `types` and `errors`; never torch, and math-verify only in the workers.
"""
