"""The plugin that puts replay into ms-swift; `python -m grpo_replay.integrations.swift_plugin`
prints its path.

ms-swift puts the folder of a plugin first on the import path, where a module beside it would hide
one of the same name, as `trl.py` would hide TRL: so this folder has nothing else. Loads nothing.
"""

from pathlib import Path

PLUGIN = Path(__file__).with_name("grpo_replay_for_ms_swift.py")
"""The file for `--external_plugins`."""
