"""The mathematics of GRPO: advantages, rollouts, batches, loss and seeds.

Imports storage, distributed, recipe, types and errors. Only `loss` imports torch.
"""
