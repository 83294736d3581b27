"""The replay buffer: priorities, draws, insertion, eviction, composition and snapshots.

In order of imports: `priorities`, `drawing`, `columns`, `insertion`, `replay_buffer`, `snapshot`,
`compose`. Imports storage, recipe, types and errors; numpy and pyarrow, no torch.
"""

from grpo_replay.replay.replay_buffer import BufferStats, ReplayBuffer

__all__ = ["BufferStats", "ReplayBuffer"]
