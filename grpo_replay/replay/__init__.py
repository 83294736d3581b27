"""The library: the replay buffer and the mathematics of GRPO around it.

The modules of the buffer, in order of imports: `priorities`, `insertion`, `entry_store`, `compose`
and `snapshot`, `replay_buffer`. Those of GRPO: `advantages`, `group`, `rollouts`, `batch`, `loss`.
The folder imports storage, recipe, types and errors, numpy and pyarrow; only `loss` imports torch.
"""

from grpo_replay.replay.entry_store import BufferStats
from grpo_replay.replay.replay_buffer import ReplayBuffer

__all__ = ["BufferStats", "ReplayBuffer"]
