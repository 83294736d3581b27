"""Estimates memory, disk, network and tokens of a run without starting it (`train --dry-run`).

Imports engine and the folders below it; not sampling, evaluation or training. torch in `trace`.
"""
