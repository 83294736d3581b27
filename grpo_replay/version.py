"""The version of the package. It imports nothing, so that everything may import it."""

__version__ = "0.1.0"
