"""The files of a run: run directory, checkpoints, rollout log, Parquet, atomic writes, trackers.

Imports distributed, recipe, types and errors; torch only inside functions.
"""
