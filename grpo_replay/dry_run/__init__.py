"""Does a run fit, and what will it cost: said before anything is spent.

Imports the engine's models and what is below.
"""
