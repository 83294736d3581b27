"""Asynchronous mode: a collector process samples and scores; the trainer reads its groups.

May import sampling, prompts, rewards, engine and the folders below them. docs/sampling.md
describes its processes.
"""
