"""The version of the package. It imports nothing, so that everything may import it."""

__version__ = "1.1.0"
