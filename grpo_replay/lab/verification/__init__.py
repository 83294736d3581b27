"""Recomputes a finished run from its files, independently: shares only the recipe and the file
readers with the code that wrote them. Imports storage, recipe, types and errors; no torch."""
