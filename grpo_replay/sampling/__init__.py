"""Samplers: the protocol, transformers (`hf`), vLLM in process, and over HTTP in `server/`.

Imports engine and what is below; torch, transformers and vllm.
"""
