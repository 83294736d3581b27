"""The library: the replay buffer and the mathematics of GRPO around it.

The buffer, in order of imports: `priorities`, `insertion`, `entry_store`, `compose` and `snapshot`,
`replay_buffer`.
GRPO: `advantages`, `group`, `rollouts`, `batch`, `loss`. Imports storage, recipe, types and
errors; numpy and pyarrow. Only `loss` imports torch.
"""

from grpo_replay.replay.entry_store import BufferStats
from grpo_replay.replay.replay_buffer import ReplayBuffer

__all__ = ["BufferStats", "ReplayBuffer"]
