"""Terminal output shared by all commands: progress, bars, library logging and plot style.

Imports only `errors`.
"""
