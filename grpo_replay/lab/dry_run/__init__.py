"""Estimates memory, disk and tokens of a run without starting it (`train --dry-run`), and checks
with the stages of a start whether it would start.
"""
