"""Replay inside other trainers: `trl` for TRL's GRPOTrainer.

Each module needs the trainer that it is named after. It may import the core, never `lab`.
"""
