"""Names of a host's settings, and advice, for the messages of the shared base."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostWords:
    """What the messages of the shared base say for one host. Example, of TRL:
    HostWords(settings="GRPOConfig", folder="output_dir", resume="resume_from_checkpoint",
    group_size="num_generations", checkpoints="checkpoint-*", …).
    """

    settings: str
    """Where the user writes the host's settings; names the source of a refused value."""
    folder: str
    """The setting that names the folder of a run."""
    resume: str
    """The setting that continues a run from a checkpoint."""
    group_size: str
    """The setting for the number of completions per prompt."""
    checkpoints: str
    """Glob pattern of the checkpoints in the folder of a run."""
    one_prompt: str = "make a group of each prompt"
    """Advice if the completions of a group have several prompts; ends that message."""
    own_advantages: str = "let the rewards have what changes the advantages after them"
    """Advice if equal rewards have advantages other than 0; a clause of that message."""
    renamed: Callable[[str], str] = str
    """Rewrites a message about the recipe (`loss.epsilon: …`) with the host's names."""
