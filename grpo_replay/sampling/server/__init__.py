"""Sampling with vLLM servers over HTTP: launch, validation, requests, weight updates.

May import the rest of `sampling`, `engine` and the folders below it, and aiohttp.
"""
