"""Looking at replay from outside: what a run's buffer did, and what it should look like.

    source -> stored/draws/training summaries -> warnings -> panels, plots, page, JSON
    rows: one rollout's life, filters, export         what_if: another buffer on the same log
    plan_*: paper B's planner applied to a recipe or a finished run

Everything reads the files of a run; nothing here trains, samples or changes one.
"""
