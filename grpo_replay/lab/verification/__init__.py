"""Reads every file of a run, and recomputes what can be recomputed, independently: shares only the
recipe and the file readers with the code that wrote them. No torch."""
