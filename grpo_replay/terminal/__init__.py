"""What all commands show: consoles, tables, progress, figures, pages; large libraries kept quiet.

Imports only `errors`.
"""
