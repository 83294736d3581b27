"""The ranks of a run: their environment, joining, collectives, failures, launching.

Imports recipe, terminal and what is below; torch only in rendezvous, processes and inside
functions.
"""
