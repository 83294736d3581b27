"""Paper B's theory of replay as a calculator: how long to keep rollouts, how often to reuse them.

Imports inspection, dry_run and the folders below them; no torch.
"""
