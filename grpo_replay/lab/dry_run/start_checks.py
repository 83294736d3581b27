"""Checks of a dry run other than memory: versions, GPUs, tokenizer, weights, prompts, disk.

The findings of each check are sentences for the report.
"""

import importlib.metadata
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_replay.errors import GrpoReplayError, RecipeError
from grpo_replay.lab.dry_run.findings import Findings
from grpo_replay.lab.dry_run.hub import weights_are_cached
from grpo_replay.lab.dry_run.rewards import check_rewards
from grpo_replay.lab.dry_run.sizes import launched_servers
from grpo_replay.prompts.sources import column_of
from grpo_replay.recipe import Recipe
from grpo_replay.recipe.open_lists import ADVANTAGES, LOSSES
from grpo_replay.recipe.paths import is_on_hub
from grpo_replay.recipe.sections import PACKING_ATTENTION
from grpo_replay.replay.priorities import load_priority
from grpo_replay.storage.atomic import free_bytes
from grpo_replay.storage.stored_sizes import to_gib
from grpo_replay.storage.tracking import missing_trackers
from grpo_replay.storage.versions import installed_version

if TYPE_CHECKING:
    from grpo_replay.prompts.prompt_set import PromptSet

_PACKAGE = "grpo-replay"
_ATTENTION_PACKAGES = {
    "flash_attention_2": "flash_attn",
    "flash_attention_3": "flash_attn_interface",
}


def check_parts(recipe: Recipe, device: str, findings: Findings) -> Any:
    """Add problems with the components of the recipe, and what could not be checked. Returns the
    prompts, or None if they were not read."""
    _check_versions(findings)
    _check_devices(recipe, device, findings)
    _check_settings(recipe, device, findings)
    _check_trackers(recipe, device, findings)
    _check_functions(recipe, findings)
    tokenizer = _check_tokenizer(recipe, findings)
    _check_weights(recipe, findings)
    _check_model(recipe, findings)
    prompts = _check_prompts(recipe, tokenizer, findings)
    runs_here = _list_for_missing(device, findings) is findings.problems
    check_rewards(recipe, prompts, runs_here, findings)
    return prompts


def check_disk_space(
    storage: Mapping[str, Any], output_dir: Path, device: str, findings: Findings
) -> None:
    """Compare the size of checkpoints with the free space where the run would write them."""
    one, most = storage["checkpoint_gib"], storage["checkpoints_gib_most"]
    if one is None:
        return
    free, missing = to_gib(free_bytes(output_dir)), _list_for_missing(device, findings)
    if free < one:
        missing.append(
            f"disk space: a checkpoint takes {one} GiB, {output_dir} has {free} GiB free"
        )
    elif free < most:
        tight = findings.assumptions if missing is findings.problems else findings.unchecked
        tight.append(
            f"disk space: all kept checkpoints and the one being written take {most} GiB, "
            f"{output_dir} has {free} GiB free"
        )


def _check_functions(recipe: Recipe, findings: Findings) -> None:
    """Add a problem if a function that the recipe names cannot be loaded."""
    try:
        load_priority(recipe.replay.priority)
        ADVANTAGES.load(recipe.advantage.estimator)
        LOSSES.load(recipe.loss.kind)
    except RecipeError as error:
        findings.problems.append(str(error))


def _check_versions(findings: Findings) -> None:
    from packaging.requirements import Requirement

    try:
        requirements = importlib.metadata.requires(_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        findings.unchecked.append(f"versions: {_PACKAGE} is not installed as a package")
        return
    for text in requirements:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        found = installed_version(requirement.name)
        if found is None:
            findings.problems.append(f"{requirement.name} is not installed: pip install '{text}'")
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            findings.problems.append(
                f"{requirement.name} {found} is installed, {requirement.specifier} is needed"
            )


def _check_devices(recipe: Recipe, device: str, findings: Findings) -> None:
    import torch

    from grpo_replay.engine.lora import MISSING_PEFT

    missing = _list_for_missing(device, findings)
    backend, launched = recipe.sampling.backend, launched_servers(recipe)
    if device == "cuda":
        found, ranks = torch.cuda.device_count(), recipe.engine.num_processes
        wanted = ranks + launched * recipe.sampling.vllm.tensor_parallel_size
        if found < wanted:
            of_servers = f" and {wanted - ranks} for the servers that it starts" if launched else ""
            findings.unchecked.append(
                f"GPUs: this machine has {found}, the recipe uses {ranks} per node{of_servers}"
            )
    if (backend == "vllm" or launched) and importlib.util.find_spec("vllm") is None:
        missing.append(
            f"sampling.backend {backend}: vLLM is not installed here: pip install "
            f"'{_PACKAGE}[vllm]'"
        )
    if lacks_peft(recipe):
        missing.append(MISSING_PEFT)
    attention = recipe.model.attn_implementation
    package = _ATTENTION_PACKAGES.get(attention)
    if package is not None and importlib.util.find_spec(package) is None:
        missing.append(
            f"model.attn_implementation {attention}: {package} is not installed here; use sdpa"
        )


def lacks_peft(recipe: Recipe) -> bool:
    """Whether the recipe trains LoRA adapters and peft is not installed here."""
    return recipe.model.lora.rank is not None and importlib.util.find_spec("peft") is None


def _list_for_missing(device: str, findings: Findings) -> list[str]:
    """The list for what this machine lacks: problems, or unchecked if the recipe needs GPUs and
    this machine has none, because the run will use another machine."""
    import torch

    elsewhere = device == "cuda" and torch.cuda.device_count() == 0
    return findings.unchecked if elsewhere else findings.problems


def _check_trackers(recipe: Recipe, device: str, findings: Findings) -> None:
    _list_for_missing(device, findings).extend(missing_trackers(recipe))


def _check_settings(recipe: Recipe, device: str, findings: Findings) -> None:
    from grpo_replay.engine.deepspeed_config import notices_of_precision

    engine, tensor = recipe.engine, recipe.sampling.vllm.tensor_parallel_size
    findings.assumptions += notices_of_precision(recipe, recipe.zero_stage(engine.num_processes))
    if recipe.sampling.backend == "vllm" and engine.num_processes % tensor:
        findings.problems.append(
            f"sampling.vllm.tensor_parallel_size {tensor} does not divide engine.num_processes "
            f"{engine.num_processes}"
        )
    if device == "cpu" and (engine.offload_optimizer or engine.offload_parameters):
        findings.problems.append(
            "offloading needs a GPU; on a CPU everything is in host memory already"
        )
    attention, tokens = recipe.model.attn_implementation, recipe.batch.max_tokens_per_microbatch
    if device == "cpu" and attention in PACKING_ATTENTION:
        findings.problems.append(f"model.attn_implementation {attention} needs a GPU; use sdpa")
    if recipe.batch.packing and attention not in PACKING_ATTENTION:
        findings.assumptions.append(
            f"batch.packing true with {attention} computes and masks every pair of tokens in a "
            f"pack of up to {tokens:,}; the mask, {tokens**2 / 2**30:.3g} G elements, and what "
            "attention keeps of so many pairs are not counted here. Use one of "
            f"{', '.join(PACKING_ATTENTION)}, or padding"
        )
    if recipe.loss.beta > 0 and engine.offload_parameters:
        findings.assumptions.append("the reference copy of loss.beta is not offloaded")


def _check_tokenizer(recipe: Recipe, findings: Findings) -> Any:
    """The tokenizer, or None."""
    from grpo_replay.engine.models import load_tokenizer
    from grpo_replay.engine.stop_tokens import find_stop_tokens

    name = recipe.model.tokenizer or recipe.model.path
    tokenizer = _attempt(lambda: load_tokenizer(recipe.model), name, "tokenizer", findings)
    if tokenizer is not None and recipe.sampling.stop_tokens is not None:
        try:
            find_stop_tokens(recipe, recipe.model, tokenizer)
        except RecipeError as error:
            findings.problems.append(str(error))
    return tokenizer


def _check_model(recipe: Recipe, findings: Findings) -> None:
    from grpo_replay.engine.cache_support import check_cache
    from grpo_replay.engine.models import check_attention

    name = recipe.model.path
    _attempt(lambda: check_attention(recipe.model), name, "attention", findings)
    _attempt(lambda: check_cache(recipe), name, "sampler", findings)


def _check_weights(recipe: Recipe, findings: Findings) -> None:
    from grpo_replay.engine.models import resolve_model_path

    if recipe.model.random_init:
        return
    path = recipe.model.path
    if is_on_hub(path):
        if not weights_are_cached(path, recipe.model.revision):
            findings.unchecked.append(
                f"weights of {path}: not in the local cache; they would be downloaded"
            )
        return
    folder = _attempt(lambda: Path(resolve_model_path(path)), path, "weights", findings)
    if folder is not None and not any(folder.glob("*.safetensors")) and not any(
        folder.glob("pytorch_model*.bin")
    ):  # fmt: skip
        findings.problems.append(
            f"model.path {path!r}: no weights in {folder}; set model.random_init: true to start "
            "from random ones"
        )


def _check_prompts(recipe: Recipe, tokenizer: Any, findings: Findings) -> "PromptSet | None":
    """Read local prompts in full, as the run would; None if they cannot be read. Of a hub dataset,
    check only the columns."""
    section = recipe.prompts
    if is_on_hub(section.source):
        _check_hub_columns(recipe, findings)
        return None
    if tokenizer is None:
        findings.unchecked.append(f"prompts of {section.source}: reading them needs the tokenizer")
        return None
    from grpo_replay.prompts.prompt_set import load_prompts

    prompts = _attempt(
        lambda: load_prompts(section, tokenizer, recipe.run.seed), section.source, "prompts",
        findings,
    )  # fmt: skip
    if prompts is not None and prompts.skipped_too_long:
        findings.assumptions.append(
            f"{len(prompts)} prompts; {prompts.skipped_too_long} longer than "
            "prompts.max_prompt_length are left out"
        )
    findings.assumptions += [] if prompts is None else prompts.notices
    return prompts


def _check_hub_columns(recipe: Recipe, findings: Findings) -> None:
    import datasets

    section = recipe.prompts
    try:
        info = datasets.load_dataset_builder(
            section.source, section.config_name, revision=section.revision
        ).info
    except (OSError, ValueError, RuntimeError) as error:
        reason = re.split(r"[\n(]", str(error))[0].strip()
        findings.unchecked.append(f"prompts of {section.source}: {type(error).__name__}: {reason}")
        return
    if info.features is None:
        findings.unchecked.append(f"columns of {section.source}: the dataset does not list them")
        return
    for name in ("problem_field", "answer_field", "id_field"):
        key = getattr(section, name)
        if key is not None and column_of(key, info.features) not in info.features:
            findings.problems.append(
                f"prompts.{name} {key!r}: {section.source} has {', '.join(info.features)}"
            )
    if info.splits and section.split.partition("[")[0] not in info.splits:
        findings.problems.append(
            f"prompts.split {section.split!r}: {section.source} has {', '.join(info.splits)}"
        )


def _attempt(action: Any, source: str, what: str, findings: Findings) -> Any:
    """Result of `action`; None if it fails: unchecked for a hub source, else a problem."""
    try:
        return action()
    except GrpoReplayError as error:
        if is_on_hub(source):
            reason = str(error).partition("\n")[0]
            findings.unchecked.append(f"{what} of {source}: {reason}")
        elif str(error) not in findings.problems:
            findings.problems.append(str(error))
        return None
