"""An evaluation outside training: its model (a checkpoint, a run, a Hugging Face folder or a hub
id), its recipe, and one process of it."""

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
"""The files that belong to a model; others in its folder, such as evaluations, do not."""

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model and its origin.

    `path` is a folder or hub id; `recipe` the run's recipe, if any; `step` the training step;
    `notice` a sentence for the user if a default was chosen; `checked` the SHA-256 of each file of
    the folder that is in the checkpoint's manifest. If `path` holds adapters, `base` is the model
    that the run trained them on.
    """

    path: str
    name: str
    recipe: Path | None = None
    step: int | None = None
    notice: str | None = None
    checked: dict[str, str] = field(default_factory=dict)
    base: ModelSection | None = None


def find_model(ckpt: str) -> ModelSource:
    """The model named by `--ckpt`. Raises CheckpointError if there is none."""
    path = Path(ckpt).expanduser()
    if ckpt.startswith("builtin:"):
        return ModelSource(ckpt, ckpt.replace(":", "-"))
    if found := list_checkpoints(path / "checkpoints") or list_checkpoints(path):
        source, run = _checkpoint(found[-1].resolve()), found[-1].parent.resolve().parent
        notice = f"evaluating {found[-1].name}, the latest checkpoint of {run}"
        return replace(source, notice=notice)
    for folder in (path, path.parent):
        if path.is_dir() and (folder / "manifest.json").is_file():
            return _checkpoint(folder.resolve(), merged=path.name == MODEL_FOLDER)
    if (path / "config.json").is_file():
        return ModelSource(str(path.resolve()), path.resolve().name)
    if _HUB_ID.fullmatch(ckpt) and not path.exists() and not path.parent.is_dir():
        return ModelSource(ckpt, path.name)
    missing = "" if path.exists() else f"{no_such_path(path)}: "
    if (path / "adapter_config.json").is_file():
        missing = "adapters alone, which are to be merged into their model first: "
    elif of_trl := sorted(path.glob("checkpoint-*"), key=lambda each: each.stat().st_mtime):
        missing = f"did you mean {of_trl[-1]}? "
    raise CheckpointError(
        f"--ckpt {ckpt}: {missing}expected a checkpoint (with model/ or adapter/), a run (with "
        "checkpoints/step_…), a Hugging Face folder (with config.json), or a hub id (owner/name, "
        "where no folder has the owner's name)"
    )


def _checkpoint(checkpoint: Path, merged: bool = False) -> ModelSource:
    """Its adapters on their base, if it has any and the `merged` weights are not asked for."""
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
        base=_base_of(run, recipe, folder) if adapted else None,
    )  # fmt: skip


def _base_of(run: Path, recipe: Path, adapter: Path) -> ModelSection:
    """The model that the adapters of a run belong to. Raises CheckpointError without its recipe."""
    if not recipe.is_file():
        raise CheckpointError(
            f"{adapter} has adapters, and {run / 'recipe.yaml'}, which names their base, is not "
            "there: evaluate the checkpoint where its run lies, or the model/ of one that has it"
        )
    return read_recipe_file(recipe).model


def model_sha256(path: str, expected: Mapping[str, str], revision: str | None = None) -> str:
    """The SHA-256 over names and contents of a model's files (`MODEL_FILES`).

    `path` is a folder, or a hub id in the local cache, of which `revision` is taken. Raises
    CheckpointError unless the model's files that are `expected` are there with their SHA-256.
    """
    folder, total = _local_folder(path, revision), hashlib.sha256()
    names = {file.name for pattern in MODEL_FILES for file in folder.glob(pattern)}
    facts = file_facts(folder, list(names))
    bad = [name for name in expected if not (folder / name).is_file()]
    for name in sorted(names):
        found = facts[name]["sha256"]
        total.update(f"{name}\0{found}\n".encode())
        bad += [name] if expected.get(name, found) != found else []
    if bad:
        raise CheckpointError(
            f"{folder / bad[0]} is missing, or has another SHA-256 than in the checkpoint's "
            "manifest: the checkpoint is damaged; evaluate another one"
        )
    return total.hexdigest()


def _local_folder(path: str, revision: str | None) -> Path:
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, revision=revision, local_files_only=True))
    except OSError as error:
        at = f" at revision {revision!r}" if revision else ""
        raise CheckpointError(f"model {path!r}{at} is not in the local cache: {error}") from error


logger = logging.getLogger(__name__)


NOT_ASYNCHRONOUS: Mapping[str, Any] = {
    "run": {"mode": "sync", "sync_every_steps": 1},
    "sampling": {"collection": {"replay_journal": None}},
}
"""An evaluation never samples while something trains, whatever the run did."""


def resolve_evaluation(
    source: ModelSource,
    recipe: str | Recipe | None = None,
    overrides: Sequence[str] = (),
    choices: Mapping[str, Any] | None = None,
) -> Recipe:
    """The recipe of an evaluation of `source`.

    It starts from `recipe`, else the run's own recipe, else the recipe of a builtin tiny model,
    else paper A's benchmarks with its settings for 0.6B and 1.7B. `overrides` (as after --set) and
    then `choices` (sections) override it; a verifier that nobody named for families of
    reasoning-gym gives way to their own. Raises RecipeError, and UsageError if no benchmark is
    named.
    """
    place = "the default recipe"
    layer: dict[str, Any] = {"eval": {"benchmarks": ["paper"], "reward": "math_verify_boxed"}}
    if isinstance(recipe, Recipe):
        place, layer = f"recipe {recipe.name}", recipe.model_dump(mode="json")
    elif (path := recipe_path(source, recipe)) is not None:
        place, layer = recipe_source(path), read_recipe_layer(path)
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
    places = (place, "--set", "the options of eval", "eval")
    found, own = resolve_recipe(layers, places), layer.get("eval") or {}
    if recipe is None and _of_gym(found.eval.benchmarks) and not _of_gym(own.get("benchmarks")):
        own.pop("reward", None)  # it is for other problems
        found = resolve_recipe(layers, places)
    if not found.eval.benchmarks:
        raise UsageError(
            f"{place} names no benchmarks to evaluate: add --benchmark, such as --benchmark paper, "
            "--benchmark math500, or --benchmark my.jsonl"
        )
    return _of_these_weights(found, source)


def _of_gym(benchmarks: Sequence[str] | None) -> bool:
    return bool(benchmarks) and all(each.startswith(GYM) for each in benchmarks or ())


def _of_these_weights(recipe: Recipe, source: ModelSource) -> Recipe:
    """The recipe with the model of `source`: the base of adapters, or weights that are loaded even
    if training started from random ones."""
    whole = {"path": source.path, "random_init": False, "lora": LoraSection()}
    own = whole if source.base is None else {}
    longest = recipe.eval.max_completion_length or recipe.sampling.max_completion_length
    return recipe.model_copy(
        update={
            "model": recipe.model.model_copy(update=own),
            "sampling": recipe.sampling.model_copy(update={"max_completion_length": longest}),
        }
    )


def recipe_path(source: ModelSource, recipe: str | None) -> Path | None:
    """The file of the recipe to evaluate under; None for the default one."""
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
    """The report of `source` under `recipe.eval` on rank 0, None elsewhere; opens and closes what
    it needs. Completions are cached in `generations`. Errors are raised on all ranks together."""
    if recipe.engine.threads_per_process is not None:
        os.environ.setdefault("OMP_NUM_THREADS", str(recipe.engine.threads_per_process))
    with quiet_libraries(), ExitStack() as stack:
        from grpo_replay.distributed.failures import run_on_main
        from grpo_replay.engine.models import load_tokenizer, resolve_model_path
        from grpo_replay.engine.saved_policies import adapted_tensors
        from grpo_replay.sampling.sampler_protocol import open_sampler

        comm = _open_comm(recipe, world_size)
        verifiers = recipe.reward.alone(recipe.eval.reward)
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
    """The `model` section of the report, and the folder of the model's generations."""
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
    from grpo_replay.engine.processes import choose_device, initialize_processes

    if not recipe.sampling.facts.on_servers:
        choose_device(recipe.engine, rank_environment().local_rank)  # refused now, not by torch
    if world_size == 1:
        return Comm()
    comm, _ = initialize_processes(recipe)
    return comm
