"""Recomputes what a run's files say, by other code than the code that wrote them: it shares the
recipe, the file readers and a few constants of the buffer. No torch."""
