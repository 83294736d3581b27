"""Evaluation: benchmarks, generation cache, statistics, reports, comparison, AES.

Imports `sampling` and the floors below it; torch only inside functions.
"""
