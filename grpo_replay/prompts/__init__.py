"""Prompts: sources of problems, rendering and order.

Imports grpo (seeds), recipe, tiny, types and errors; no torch.
"""
