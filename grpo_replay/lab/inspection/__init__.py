"""Inspection of a run's buffer from its files: summaries, warnings, figures and what-if.

Read-only. Imports `replay` and the folders below it; never torch.
"""
