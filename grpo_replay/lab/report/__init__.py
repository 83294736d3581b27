"""Many runs: a sweep of recipes and seeds, and the report that compares them.

Imports from the floors below; commands/ calls it.
"""
