from grpo_replay.integrations.swift_plugin import PLUGIN

print(PLUGIN)
