"""The words of a host in messages of the shared base: names of its settings, and what to do."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostWords:
    """Example, of TRL: HostWords(settings="GRPOConfig", folder="output_dir",
    resume="resume_from_checkpoint", group_size="num_generations", checkpoints="checkpoint-*", …).
    """

    settings: str
    """Where the host's own settings are written: the place that a refused value is in."""
    folder: str
    """The setting that names the folder of a run."""
    resume: str
    """The setting that continues a run from a checkpoint."""
    group_size: str
    """The setting that says how many completions a prompt gets."""
    checkpoints: str
    """The pattern of the names of its checkpoints in the folder of a run."""
    one_prompt: str = "make a group of each prompt"
    """What to do if the completions of a group have several prompts: ends such a message."""
    own_advantages: str = "let the rewards have what changes the advantages after them"
    """What to do if equal rewards have advantages other than 0: stands inside such a message."""
    renamed: Callable[[str], str] = str
    """A message about the recipe (`loss.epsilon: …`) in the names of the host's settings."""
