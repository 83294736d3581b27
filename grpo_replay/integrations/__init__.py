"""Replay inside other trainers: `trl` for TRL's GRPOTrainer, `swift` for ms-swift's, `verl` for
verl's V1 trainers. `host` is what all of them share, with a worked example for those who write
another.

A host's module needs the trainer that it is named after. It may import the core, never `lab`.
"""
