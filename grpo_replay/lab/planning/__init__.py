"""Paper B's theory of replay as a calculator: how long to keep rollouts, how often to reuse them.

Also what a recipe is expected to do before its first run (`expected`). Imports inspection and the
folders below it; no torch.
"""
