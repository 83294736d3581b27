"""Prompts: where rows come from, how they are rendered, in which order.

Imports recipe, tiny, types and errors; no torch.
"""
