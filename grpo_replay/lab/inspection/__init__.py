"""Inspection of a run's buffer from its files: summaries, warnings, figures, filters and what-if.

Read-only. Imports `buffer` and the layers below it; never torch.
"""
