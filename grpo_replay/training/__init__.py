"""Algorithm 1 (`trainer`) and a whole run of it: metrics, weight sync, summary, model card.

Imports the rest of the core, never the laboratory or `cli`; torch only inside functions.
"""
