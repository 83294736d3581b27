"""The replay buffer: priorities and the draw law, storage and eviction, snapshots.

numpy and pyarrow only. Layers, each knowing the one before it: `priorities` (floats), `drawing`
(what can be drawn, and the draw), `columns` (storage), `insertion` (what may enter),
`replay_buffer`, `snapshot` (files), `compose` (what a step trains on). Imports storage and what is
below.
"""

from grpo_replay.buffer.replay_buffer import BufferStats, ReplayBuffer

__all__ = ["BufferStats", "ReplayBuffer"]
