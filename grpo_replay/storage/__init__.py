"""What a run leaves on disk: directory, checkpoints, rollout log, Parquet, trackers.

Imports recipe, types and errors; no torch.
"""
