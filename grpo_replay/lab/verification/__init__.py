"""Recomputes what a run's files say: shares only the recipe and the file readers with the code that
wrote them. No torch."""
