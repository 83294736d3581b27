"""vLLM servers over HTTP: launching, checking, requests, new weights.

Imports sampling's shared parts, engine and what is below.
"""
