"""Prompts: sources of problems, rendering and order.

Imports replay (seeds), recipe, tiny, types and errors; no torch.
"""
