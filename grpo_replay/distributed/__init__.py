"""The ranks of a run: their environment, joining, collectives, failures, launching.

Imports storage, rewards and what is below; torch only in rendezvous, processes and inside
functions.
"""
