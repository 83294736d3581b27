"""Rewards: the scorer, its worker processes, and the built-in answer verifiers.

Imports recipe, types and errors; no torch, and math-verify in the workers alone.
"""
