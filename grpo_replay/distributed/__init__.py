"""The ranks of a run: environment, launching, joining, messages, failures.

May import recipe, terminal and the floors below; torch only in rendezvous.py and
inside functions.
"""
