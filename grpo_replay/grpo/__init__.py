"""The mathematics of GRPO: advantages, rollouts, batch, loss, seeds.

Imports storage, recipe, types and errors; torch only in `loss`.
"""
