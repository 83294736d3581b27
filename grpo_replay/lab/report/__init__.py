"""The report that compares many runs: arms, intervals over seeds, costs, figures, page.

Imports the core, `inspection`, `planning` and the files of a `sweep`.
"""
