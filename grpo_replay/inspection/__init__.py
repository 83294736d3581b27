"""Looking at replay from outside: what a run's buffer did, and what it should look like.

    source -> stored/draws/training summaries -> warnings -> panels, plots, page, JSON
    rows: one rollout's life, filters, export         what_if: another buffer on the same log

Everything reads the files of a run; nothing here trains, samples or changes one. Imports buffer
and what is below; no torch.
"""
