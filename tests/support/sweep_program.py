"""A sweep of fake runs in a process of its own: `sweep_program.py SWEEP OUTPUT_DIR JOBS`."""

import sys

from grpo_replay.commands import sweep
from grpo_replay.commands.error_boundary import report_error
from grpo_replay.experiments import local

local.ENTRY = "fake_trainer"
name, folder, jobs = sys.argv[1:]
try:
    code = sweep.run(sweep.SweepOptions(name, jobs=int(jobs), output_dir=folder))
except Exception as error:
    code = report_error(error)
sys.exit(code)
