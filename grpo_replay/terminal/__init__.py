"""Output of all commands: consoles, tables, progress, figures, pages; and quiet libraries.

Imports only `errors`.
"""
