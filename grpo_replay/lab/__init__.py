"""The laboratory: looks at run directories and answers questions. Nothing below `cli` imports it.

`sweep` runs grids of runs, `report` compares them; `inspection` shows a buffer, `verification`
recomputes a run from its files; `planning` is paper B's theory, `dry_run` estimates a run.
"""
