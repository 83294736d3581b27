"""Samplers: the protocol, transformers (`hf`), vLLM in process, and vLLM over HTTP in `server/`.

May import `engine` and the folders below it, and torch, transformers and vllm.
"""
