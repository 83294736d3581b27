"""Paper B's theory of replay, and its estimate from a recipe or a finished run.

Imports inspection and what is below; no torch.
"""
