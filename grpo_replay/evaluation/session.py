"""An evaluation outside training: its model (a checkpoint, a run, a Hugging Face folder or a hub
id), its recipe, and the work of one process."""

import hashlib
import logging
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from grpo_replay.distributed.comm import Comm
from grpo_replay.distributed.environment import rank_environment
from grpo_replay.distributed.failures import run_collectively
from grpo_replay.errors import CheckpointError, UsageError, no_such_path
from grpo_replay.evaluation.benchmarks import plan_evaluation, try_verifier
from grpo_replay.evaluation.cache import generations_folder, sampler_facts
from grpo_replay.evaluation.evaluate import OnProgress, evaluate
from grpo_replay.evaluation.evaluation_report import EvaluationReport
from grpo_replay.recipe import (
    LoraSection,
    ModelSection,
    Recipe,
    find_recipe,
    parse_overrides,
    read_recipe_layer,
    recipe_source,
    resolve_recipe,
)
from grpo_replay.recipe.input_sections import GYM
from grpo_replay.rewards.scorer import RewardScorer
from grpo_replay.storage.checkpoint import (
    ADAPTER_FOLDER,
    MODEL_FOLDER,
    checkpoint_name,
    file_facts,
    list_checkpoints,
    read_json,
    read_state,
)
from grpo_replay.storage.stored_recipe import RECIPE_FILE, read_recipe_file
from grpo_replay.terminal.quiet import quiet_libraries
from grpo_replay.tiny import BASES

MODEL_FILES = (
    *("*.safetensors", "*.bin", "*.index.json", "config.json", "generation_config.json"),
    "adapter_config.json",
    *("tokenizer*", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template*", "*.py"),
)
"""Patterns of the files of a model; others in its folder, such as evaluations, are not part of
it."""

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model and its origin.

    `path` is a folder or hub id; `recipe` the run's recipe, if any; `step` the training step;
    `notice` a sentence for the user if a default was chosen; `checked` the SHA-256 of each file in
    the folder that the checkpoint's manifest lists. If `path` holds adapters, `base` is the model
    that they were trained on.
    """

    path: str
    name: str
    recipe: Path | None = None
    step: int | None = None
    notice: str | None = None
    checked: dict[str, str] = field(default_factory=dict)
    base: ModelSection | None = None


def find_model(ckpt: str) -> ModelSource:
    """Find the model that `--ckpt` names: a builtin, a run (its latest checkpoint, with a notice),
    a checkpoint or its model/, a Hugging Face folder, or a hub id unless such a folder exists.
    Raises CheckpointError for others."""
    path = Path(ckpt).expanduser()
    if ckpt.startswith("builtin:"):
        return ModelSource(ckpt, ckpt.replace(":", "-"))
    if checkpoints := list_checkpoints(path / "checkpoints") or list_checkpoints(path):
        last = checkpoints[-1].resolve()
        notice = f"evaluating {last.name}, the latest checkpoint of {last.parent.parent}"
        return replace(_checkpoint_source(last), notice=notice)
    for folder in (path, path.parent):
        if path.is_dir() and (folder / "manifest.json").is_file():
            return _checkpoint_source(folder.resolve(), merged=path.name == MODEL_FOLDER)
    if (path / "config.json").is_file():
        return ModelSource(str(path.resolve()), path.resolve().name)
    if _HUB_ID.fullmatch(ckpt) and not path.exists() and not path.parent.is_dir():
        return ModelSource(ckpt, path.name)
    missing = "" if path.exists() else f"{no_such_path(path)}: "
    if (path / "adapter_config.json").is_file():
        missing = "only adapters, which must be merged into their model first: "
    elif trl := sorted(path.glob("checkpoint-*"), key=lambda folder: folder.stat().st_mtime):
        missing = f"did you mean {trl[-1]}? "
    raise CheckpointError(
        f"--ckpt {ckpt}: {missing}expected a checkpoint (with model/ or adapter/), a run (with "
        "checkpoints/step_…), a Hugging Face folder (with config.json), or a hub id (owner/name, "
        "unless a folder has the owner's name)"
    )


def _checkpoint_source(checkpoint: Path, merged: bool = False) -> ModelSource:
    """Returns a checkpoint's model with its digests from the manifest: the adapters on their base,
    if it has any, unless `merged` is wanted."""
    manifest = read_json(checkpoint / "manifest.json", "the checkpoint is incomplete")
    step = int(read_json(checkpoint / "state.json", "the checkpoint is incomplete")["step"])
    run = checkpoint.parent.parent
    recipe = run / RECIPE_FILE
    adapted = not merged and (checkpoint / ADAPTER_FOLDER).is_dir()
    folder = checkpoint / (ADAPTER_FOLDER if adapted else MODEL_FOLDER)
    checked = {Path(name): facts["sha256"] for name, facts in manifest["files"].items()}
    return ModelSource(
        str(folder),
        f"{run.name}-{checkpoint_name(step)}",
        recipe if recipe.is_file() else None,
        step,
        checked={name.name: digest for name, digest in checked.items()
                 if str(name.parent) == folder.name},
        base=_adapter_base(run, recipe, folder) if adapted else None,
    )  # fmt: skip


def _adapter_base(run: Path, recipe: Path, adapter: Path) -> ModelSection:
    """Returns the adapters' base model. Raises CheckpointError if the run's recipe is missing."""
    if not recipe.is_file():
        raise CheckpointError(
            f"{adapter} has adapters, and {run / 'recipe.yaml'}, which names their base, is "
            "missing: evaluate the checkpoint inside its run, or the model/ of one that has it"
        )
    return read_recipe_file(recipe).model


def model_sha256(path: str, expected: Mapping[str, str], revision: str | None = None) -> str:
    """Compute the SHA-256 over names and contents of a model's files (`MODEL_FILES`).

    `path` is a folder, or a hub id in the local cache at `revision`. Raises CheckpointError if one
    of the `expected` files is missing or has another SHA-256 than expected.
    """
    folder, total = _local_folder(path, revision), hashlib.sha256()
    names = {file.name for pattern in MODEL_FILES for file in folder.glob(pattern)}
    facts = file_facts(folder, list(names))
    bad = [name for name in expected if not (folder / name).is_file()]
    for name in sorted(names):
        digest = facts[name]["sha256"]
        total.update(f"{name}\0{digest}\n".encode())
        bad += [name] if expected.get(name, digest) != digest else []
    if bad:
        raise CheckpointError(
            f"{folder / bad[0]} is missing, or has another SHA-256 than in the checkpoint's "
            "manifest: the checkpoint is damaged; evaluate another one"
        )
    return total.hexdigest()


def _local_folder(path: str, revision: str | None) -> Path:
    """Returns a model's folder, of a hub id the one in the cache. Raises CheckpointError."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, revision=revision, local_files_only=True))
    except OSError as error:
        suffix = f" at revision {revision!r}" if revision else ""
        raise CheckpointError(
            f"model {path!r}{suffix} is not in the local cache: {error}"
        ) from error


logger = logging.getLogger(__name__)


NOT_ASYNCHRONOUS: Mapping[str, Any] = {
    "run": {"mode": "sync", "sync_every_steps": 1},
    "sampling": {"collection": {"replay_journal": None}},
}
"""Settings of every evaluation, also of an asynchronous run: nothing trains meanwhile."""


def resolve_evaluation(
    source: ModelSource,
    recipe: str | Recipe | None = None,
    overrides: Sequence[str] = (),
    choices: Mapping[str, Any] | None = None,
) -> Recipe:
    """Resolve the recipe of an evaluation of `source`.

    The first of these is the base: `recipe`, the run's own recipe, the recipe of a builtin tiny
    model, paper A's benchmarks with its settings for 0.6B and 1.7B. `overrides` (as after --set)
    and then `choices` (sections) override it. Benchmarks of reasoning-gym are graded by their own
    verifiers unless another was chosen for them. Raises RecipeError, and UsageError if no benchmark
    is named.
    """
    origin = "the default recipe"
    layer: dict[str, Any] = {"eval": {"benchmarks": ["paper"], "reward": "math_verify_boxed"}}
    if isinstance(recipe, Recipe):
        origin, layer = f"recipe {recipe.name}", recipe.model_dump(mode="json")
    elif (path := recipe_path(source, recipe)) is not None:
        origin, layer = recipe_source(path), read_recipe_layer(path)
        layer.setdefault("name", path.stem)
        if recipe is None and isinstance(layer.get("model"), dict):
            layer["model"].pop("tokenizer", None)  # a checkpoint has its own
    model = layer.get("model")
    if source.base is not None:
        layer["model"] = source.base.model_dump(mode="json")
    elif isinstance(model, dict) and model.get("path") != source.path:
        model.pop("revision", None)  # of another model
    changes = parse_overrides(overrides)
    if "path" in changes.get("model", {}):
        raise UsageError("--set model.path: eval takes the model from --ckpt")
    layers = [layer, changes, dict(choices or {}), NOT_ASYNCHRONOUS]
    origins = (origin, "--set", "the options of eval", "eval")
    resolved, own = resolve_recipe(layers, origins), layer.get("eval") or {}
    changes_to_gym = _all_gym(resolved.eval.benchmarks) and not _all_gym(own.get("benchmarks"))
    if recipe is None and changes_to_gym:
        own.pop("reward", None)  # it is for other problems
        resolved = resolve_recipe(layers, origins)
    if not resolved.eval.benchmarks:
        raise UsageError(
            f"{origin} names no benchmarks to evaluate: add --benchmark, such as --benchmark "
            "paper, --benchmark math500, or --benchmark my.jsonl"
        )
    return _with_source_model(resolved, source)


def _all_gym(benchmarks: Sequence[str] | None) -> bool:
    return bool(benchmarks) and all(name.startswith(GYM) for name in benchmarks or ())


def _with_source_model(recipe: Recipe, source: ModelSource) -> Recipe:
    """Returns the recipe with the model of `source`, whose weights are loaded even if training
    started from random ones; for adapters the recipe already has their base."""
    loaded = {"path": source.path, "random_init": False, "lora": LoraSection()}
    changes = loaded if source.base is None else {}
    longest = recipe.eval.max_completion_length or recipe.sampling.max_completion_length
    return recipe.model_copy(
        update={
            "model": recipe.model.model_copy(update=changes),
            "sampling": recipe.sampling.model_copy(update={"max_completion_length": longest}),
        }
    )


def recipe_path(source: ModelSource, recipe: str | None) -> Path | None:
    """Returns the file of the recipe to evaluate with; None for the default recipe."""
    if recipe is not None:
        return find_recipe(recipe)
    name = source.path.removeprefix("builtin:")
    return find_recipe(name) if source.path != name and name in BASES else source.recipe


def evaluate_model(
    recipe: Recipe,
    source: ModelSource,
    generations: Path,
    world_size: int,
    on_progress: OnProgress | None = None,
) -> EvaluationReport | None:
    """Evaluate `source` with `recipe.eval`. Returns the report, None off rank 0. Opens and closes
    sampler and scorer; caches completions in `generations`. All ranks raise one's error."""
    if recipe.engine.threads_per_process is not None:
        os.environ.setdefault("OMP_NUM_THREADS", str(recipe.engine.threads_per_process))
    with quiet_libraries(), ExitStack() as stack:
        from grpo_replay.distributed.failures import run_on_main
        from grpo_replay.engine.models import load_tokenizer, resolve_model_path
        from grpo_replay.engine.saved_policies import adapted_tensors
        from grpo_replay.sampling.sampler_protocol import open_sampler

        comm = _open_comm(recipe, world_size)
        verifiers = recipe.reward.with_single_function(recipe.eval.reward)
        scorer = stack.enter_context(RewardScorer.open(verifiers, as_verdicts=True))
        tokenizer = load_tokenizer(recipe.model)
        plan = run_collectively(comm, lambda: plan_evaluation(tokenizer, recipe))
        for notice in run_on_main(comm, lambda: try_verifier(recipe.reward, plan)) or []:
            logger.warning(notice)
        path = resolve_model_path(recipe.model.path)
        sampler = open_sampler(recipe, path, comm)
        stack.callback(sampler.close)
        if source.base is not None:
            sampler.load_weights(adapted_tensors(recipe, Path(source.path).parent), version=1)
        model, cache = run_collectively(comm, lambda: _identify(recipe, source, path, generations))
        return evaluate(
            sampler,
            tokenizer,
            plan,
            comm,
            scorer,
            model=model,
            generations_folder=cache,
            on_progress=on_progress if comm.is_main else None,
        )


def _identify(
    recipe: Recipe, source: ModelSource, path: str, generations: Path
) -> tuple[dict[str, Any], Path]:
    """Returns the `model` section of the report, and the folder of the model's generations.
    Adapters are identified by their base and their own files."""
    revision = None if Path(path).is_dir() else recipe.model.revision
    sha256 = model_sha256(path, {} if source.base else source.checked, revision)
    if source.base is not None:
        adapter, base = Path(source.path), read_state(Path(source.path).parent).base
        parts = (sha256, base, model_sha256(str(adapter), source.checked))
        sha256 = hashlib.sha256("".join(parts).encode()).hexdigest()
    dtype, device = recipe.sampled_dtype, recipe.engine.device
    model = {
        "name": source.name,
        "path": source.path,
        "revision": revision,
        "step": source.step,
        "sha256": sha256,
        "recipe": recipe.name,
        "dtype": dtype,
        **sampler_facts(recipe.sampling),
    }
    folder = generations_folder(generations, sha256, dtype, device, recipe.model, recipe.sampling)
    return model, folder


def _open_comm(recipe: Recipe, world_size: int) -> Comm:
    """Opens the ranks' communication. Raises LaunchError if a sampler here lacks its GPU."""
    from grpo_replay.engine.processes import choose_device, initialize_processes

    if not recipe.sampling.facts.on_servers:
        choose_device(recipe.engine, rank_environment().local_rank)  # refused now, not by torch
    if world_size == 1:
        return Comm()
    comm, _ = initialize_processes(recipe)
    return comm
