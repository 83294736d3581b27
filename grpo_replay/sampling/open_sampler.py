"""Open the sampler that a recipe names."""

from pathlib import Path
from typing import TYPE_CHECKING

from grpo_replay.sampling.sampler_protocol import Sampler

if TYPE_CHECKING:
    from grpo_replay.distributed.comm import Comm
    from grpo_replay.recipe import Recipe


def open_sampler(
    recipe: "Recipe", model_path: str, comm: "Comm", log_folder: Path | None = None
) -> Sampler:
    """The sampler that `recipe.sampling.backend` names, holding the weights in `model_path`
    (a local folder or hub id) as policy version 0. Servers that it launches log to `log_folder`
    (a temporary folder if None). Collective."""
    backend = recipe.sampling.backend
    if backend == "hf":
        from grpo_replay.sampling.hf import HfSampler

        return HfSampler.open(recipe, model_path)
    if backend == "vllm":
        from grpo_replay.sampling.vllm_local import VllmLocalSampler

        return VllmLocalSampler.open(recipe, model_path, comm)
    if recipe.run.mode == "async":
        if recipe.sampling.collection.replay_journal is not None:
            from grpo_replay.sampling.none import NoSampler

            return NoSampler.open(recipe, model_path)
        from grpo_replay.sampling.server.rolling import RollingServerSampler

        return RollingServerSampler.open(recipe, model_path, comm, log_folder)
    from grpo_replay.sampling.server.sampler import VllmServerSampler

    return VllmServerSampler.open(recipe, model_path, comm, log_folder)
