"""Prompts: sources of problems, rendering and order.

Imports rewards (`gym`), recipe, tiny, hub, types and errors; no torch.
"""
