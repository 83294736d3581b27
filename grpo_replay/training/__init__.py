"""Algorithm 1 (`trainer`) and a whole run of it: metrics, weight sync, summary, model card.

Imports everything but commands; torch only inside functions.
"""
