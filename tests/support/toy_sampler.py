"""A sampler as somebody adds it: a class, and a line in `recipe/open_lists.py`."""

from typing import ClassVar

from grpo_replay.sampling.hf import HfSampler


class ToySampler(HfSampler):
    """Decodes like `hf`, and remembers what a run did with it."""

    checked_on: ClassVar[list[int]] = []
    got_adapters_alone: ClassVar[list[bool]] = []

    @classmethod
    def check(cls, opening, ranks, ranks_here, elsewhere=False):
        cls.checked_on.append(ranks)

    def load_weights(self, named_tensors, version):
        held = list(named_tensors)
        self.got_adapters_alone.append(all("lora_" in name for name, _ in held))
        super().load_weights(iter(held), version)
