"""Checks of a dry run other than memory: GPUs, packages, functions, tokenizer, weights, prompts,
rewards, disk. Each adds sentences to the findings.
"""

import contextlib
import importlib.util
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_replay.errors import GrpoReplayError, OutputDirectoryError
from grpo_replay.lab.dry_run.planner import Findings, Machines
from grpo_replay.recipe import (
    BUILTIN_VERIFIERS,
    EngineSection,
    ModelSection,
    PromptsSection,
    Recipe,
    RewardSection,
    SamplingSection,
)
from grpo_replay.recipe.layers import is_on_hub
from grpo_replay.recipe.open_lists import ADVANTAGES, LOSSES
from grpo_replay.recipe.recipe import PACKING_ATTENTION
from grpo_replay.replay.priorities import load_priority
from grpo_replay.rewards.scorer import RewardScorer
from grpo_replay.rewards.trial import CHECKED_ANSWERS, Sample, notices_of_workers, try_rewards
from grpo_replay.storage.checkpoint import list_checkpoints, newest_state
from grpo_replay.storage.run_directory import RunDirectory
from grpo_replay.storage.tracking import missing_trackers
from grpo_replay.terminal.quiet import quiet_libraries

if TYPE_CHECKING:
    from grpo_replay.evaluation.benchmarks import EvaluationPlan
    from grpo_replay.prompts.prompt_set import PromptSet

_ATTENTION_PACKAGES = {
    "flash_attention_2": "flash_attn",
    "flash_attention_3": "flash_attn_interface",
}


def check_parts(
    recipe: Recipe, known_model: ModelSection, machines: Machines, findings: Findings
) -> "tuple[PromptSet | None, EvaluationPlan | None]":
    """Check every part of the recipe. `known_model` is its model, or the shipped configuration
    that stands for it. Returns the prompts and the plan of the evaluations, if they could be
    read."""
    from grpo_replay.engine.compiled import refuse_stage_3
    from grpo_replay.engine.deepspeed_engine import notices_of_precision
    from grpo_replay.engine.passed_settings import check_passed_settings
    from grpo_replay.sampling.sampler_protocol import find_stop_tokens, sampler_class
    from grpo_replay.training.journal_rules import refuse_other_journal

    stage = recipe.zero_stage(machines.total_ranks)
    findings.assumptions += notices_of_precision(recipe.model.dtype, stage)
    _attempt(lambda: refuse_stage_3(recipe.model.compile, stage), findings)
    check_devices(recipe.model, recipe.sampling, machines, findings)
    _check_engine(recipe.engine, recipe.model, recipe.sampling, machines, findings)
    for sentence in missing_trackers(recipe.tracking):
        _missing(sentence, machines, findings)
    _check_named_functions(recipe, findings)
    with quiet_libraries():
        _attempt(lambda: check_passed_settings(recipe, stage, machines.on_cuda), findings)
    _attempt(lambda: refuse_other_journal(recipe), findings)
    tokenizer = _check_tokenizer(recipe.model, findings)
    if tokenizer is not None and recipe.sampling.stop_tokens is not None:
        stop_tokens = recipe.sampling.stop_tokens
        _attempt(lambda: find_stop_tokens(stop_tokens, recipe.model, tokenizer), findings)
    _check_model(recipe.model, known_model, recipe.longest_rollout, machines, findings)
    _attempt(lambda: sampler_class(recipe.sampling), findings)
    prompts = _check_prompts(
        recipe.prompts, recipe.run.seed, recipe.reward.reads_rows, tokenizer, findings
    )
    evaluation = _plan_evaluation(recipe, tokenizer, findings)
    if prompts is not None:
        held_out = set() if evaluation is None else evaluation.problem_texts
        notices = prompts.notices_of_use(recipe.sampling.prompts_per_step, held_out)
        findings.assumptions += notices
    known = recipe.model_copy(update={"model": known_model})
    longest = None if prompts is None else prompts.longest_prompt
    _check_room(known, longest, 1 if evaluation is None else evaluation.longest_prompt, findings)
    own = recipe.reward, recipe.eval.reward if recipe.eval.benchmarks else None
    check_rewards(*own, prompts, evaluation, machines, findings)
    return prompts, evaluation


def _check_named_functions(recipe: Recipe, findings: Findings) -> None:
    _attempt(lambda: load_priority(recipe.replay.priority), findings)
    _attempt(lambda: ADVANTAGES.load(recipe.advantage.estimator), findings)
    _attempt(lambda: LOSSES.load(recipe.loss.kind), findings)


def _missing(sentence: str, machines: Machines, findings: Findings) -> None:
    """What this machine lacks is a problem, or unchecked if the run will use another one."""
    if machines.elsewhere:
        findings.unchecked.append(sentence)
    else:
        findings.refuse(sentence)


def _attempt(
    action: Callable[[], Any], findings: Findings, source: str = "", what: str = ""
) -> Any:
    """Result of `action`; None if it fails: unchecked for a hub source, else a problem."""
    try:
        return action()
    except GrpoReplayError as error:
        if source and is_on_hub(source):
            away = "neither in the local cache" in str(error)
            reason = "neither in the local cache nor fetched from the hub" if away else str(error)
            findings.unchecked.append(f"{what} of {source}: {reason.partition(chr(10))[0]}")
        else:
            findings.refuse(error)
        return None


def check_output_directory(
    recipe: Recipe, folder: Path, resume: bool, machines: Machines, findings: Findings
) -> None:
    """Whether the run may begin in the folder, or go on there with this recipe. A new run on
    another machine may find that machine's own folder there."""
    run_dir = RunDirectory(folder)
    if resume and not run_dir.is_unborn:
        notices = _attempt(lambda: _notices_of_resume(recipe, run_dir), findings)
        findings.assumptions += notices or []
        return
    try:
        run_dir.refuse_occupied()
        _refuse_unwritable(folder)
    except OutputDirectoryError as error:
        if machines.elsewhere:
            findings.unchecked.append(f"on this machine: {error}")
        else:
            findings.refuse(error)


def _refuse_unwritable(folder: Path) -> None:
    """Raises OutputDirectoryError if this user may not write in the folder, or where it would be
    made."""
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        raise OutputDirectoryError(
            f"output directory {folder}: {there} cannot be written: choose another --output-dir, "
            "or change its permissions"
        )


def _notices_of_resume(recipe: Recipe, run_dir: RunDirectory) -> list[str]:
    """Notices if the reward is another than at the last checkpoint. Raises RecipeError for a recipe
    with which the run in the directory cannot go on. Files are not verified."""
    from grpo_replay.engine.models import refuse_other_shapes
    from grpo_replay.training.journal_rules import refuse_other_rules, refuse_other_steps
    from grpo_replay.training.resuming import refuse_fewer_steps, refuse_other_unit
    from grpo_replay.training.reward_watch import notices_of_change, reward_facts

    refuse_other_rules(recipe, run_dir.path)
    refuse_other_unit(recipe.draws_per_step, run_dir.path)
    checkpoints, state = list_checkpoints(run_dir.checkpoints), newest_state(run_dir.checkpoints)
    refuse_fewer_steps(recipe.run.steps, state.step)
    refuse_other_steps(recipe, run_dir.path, state.step)
    if not checkpoints:
        return []
    refuse_other_shapes(recipe.model, checkpoints[-1] / "model")
    with RewardScorer.open(recipe.reward.model_copy(update={"workers": 1})) as scorer:
        now = reward_facts(recipe.reward, scorer.sources())
    return notices_of_change(recipe, checkpoints[-1], state.reward, now)


def check_disk_space(
    checkpoint_bytes: int, keep: int, output_dir: Path, machines: Machines, findings: Findings
) -> None:
    """Whether there is room for the checkpoints where the run would write them, as the run looks
    for it at its start. Of a run on other machines, what this one has is only an assumption."""
    from grpo_replay.training.resuming import notices_of_room

    only_here = not (machines.elsewhere or len(machines.ranks) > 1)
    try:
        notices = notices_of_room(output_dir / "checkpoints", keep, checkpoint_bytes)
    except OutputDirectoryError as error:
        if only_here:
            findings.refuse(error)
            return
        notices = [str(error)]
    if only_here:
        findings.warnings += notices
    else:
        findings.assumptions += [f"on this machine: {each}" for each in notices]


def check_devices(
    model: ModelSection, sampling: SamplingSection, machines: Machines, findings: Findings
) -> None:
    """GPUs, and packages that are not always installed."""
    ranks, launched = max(machines.ranks), sampling.servers_launched
    if machines.gpus is not None and not machines.elsewhere and ranks > machines.gpus:
        taken = f" for them, and {launched} for the servers that it starts" if launched else ""
        findings.refuse(
            f"engine.num_processes {ranks}: this machine has {machines.gpus} GPUs{taken}: "
            "set it to that number"
        )
    elif machines.elsewhere:
        more = launched * sampling.vllm.tensor_parallel_size
        of_servers = f" and {more} for the servers that it starts" if more else ""
        findings.unchecked.append(f"GPUs: the recipe uses {ranks} on each node{of_servers}")
    if (sampling.vllm_in_ranks or launched) and importlib.util.find_spec("vllm") is None:
        text = f"sampling.backend {sampling.backend}: vLLM is not installed here"
        _missing(f"{text}: pip install 'grpo-replay[vllm]'", machines, findings)
    if model.lora.r is not None and importlib.util.find_spec("peft") is None:
        from grpo_replay.engine.weights import MISSING_PEFT

        _missing(MISSING_PEFT, machines, findings)
    package = _ATTENTION_PACKAGES.get(model.attn_implementation)
    if package is not None and importlib.util.find_spec(package) is None:
        text = f"model.attn_implementation {model.attn_implementation}: {package} is not installed"
        _missing(f"{text} here; use sdpa", machines, findings)


def _check_engine(
    engine: EngineSection,
    model: ModelSection,
    sampling: SamplingSection,
    machines: Machines,
    findings: Findings,
) -> None:
    tensor = sampling.vllm.tensor_parallel_size
    if sampling.vllm_in_ranks and any(ranks % tensor for ranks in machines.ranks):
        findings.refuse(
            f"sampling.vllm.tensor_parallel_size {tensor} does not divide engine.num_processes "
            f"{max(machines.ranks)}"
        )
    if not machines.on_cuda and (engine.offload_optimizer or engine.offload_parameters):
        findings.refuse("offloading needs a GPU; on a CPU everything is in host memory already")
    attention = model.attn_implementation
    if not machines.on_cuda and attention in PACKING_ATTENTION:
        findings.refuse(f"model.attn_implementation {attention} needs a GPU; use sdpa")


def _check_tokenizer(model: ModelSection, findings: Findings) -> Any:
    """The tokenizer, or None."""
    from grpo_replay.engine.models import load_tokenizer

    return _attempt(
        lambda: load_tokenizer(model), findings, model.tokenizer or model.path, "tokenizer"
    )


def _check_model(
    model: ModelSection,
    known_model: ModelSection,
    longest: int,
    machines: Machines,
    findings: Findings,
) -> None:
    """Attention, weights and precision."""
    from grpo_replay.engine.models import check_attention, float32_warning, load_config

    _attempt(lambda: check_attention(model), findings, model.path, "attention")
    _check_weights(model, findings)
    with contextlib.suppress(GrpoReplayError):  # reported with the sizes of the model
        config = load_config(known_model)
        warning = float32_warning(known_model, config, longest, machines.on_cuda)
        findings.assumptions += [] if warning is None else [warning]


def _check_weights(model: ModelSection, findings: Findings) -> None:
    from grpo_replay.engine.models import refuse_missing_weights

    if model.random_init:
        return
    if is_on_hub(model.path):
        try:
            cached = _weights_are_cached(model.path, model.revision)
        except ValueError:  # the hub's client on what is no id
            findings.refuse(f"model.path {model.path!r}: neither a folder here nor a hub id", 3)
            return
        if not cached:
            findings.unchecked.append(
                f"weights of {model.path}: not in the local cache; they would be downloaded"
            )
        return
    _attempt(lambda: refuse_missing_weights(model), findings)


def _weights_are_cached(path: str, revision: str | None) -> bool:
    from huggingface_hub import try_to_load_from_cache

    names = ("model.safetensors", "model.safetensors.index.json")
    return any(isinstance(try_to_load_from_cache(path, n, revision=revision), str) for n in names)


def _check_prompts(
    section: PromptsSection, seed: int, whole_rows: bool, tokenizer: Any, findings: Findings
) -> "PromptSet | None":
    """Read local prompts in full, as the run would; None if they cannot be read. Those of a hub
    dataset are not read."""
    from grpo_replay.prompts.prompt_set import load_prompts

    names = ", ".join(section.source_names)
    if any(is_on_hub(str(each.source)) for each in section.sources):
        findings.unchecked.append(f"prompts of {names}: the run reads a hub dataset at its start")
        return None
    if tokenizer is None:
        findings.unchecked.append(f"prompts of {names}: reading them needs the tokenizer")
        return None
    prompts = _attempt(lambda: load_prompts(section, tokenizer, seed, whole_rows), findings)
    if prompts is not None:
        findings.warnings += prompts.warnings
        findings.assumptions += [each for each in prompts.notices if each not in prompts.warnings]
    return prompts


def _plan_evaluation(recipe: Recipe, tokenizer: Any, findings: Findings) -> "EvaluationPlan | None":
    """The plan of the run's evaluations, None if a benchmark or the tokenizer is not here."""
    from grpo_replay.evaluation.benchmarks import find_benchmarks, local_file, plan_evaluation

    settings, prompts, sampling = recipe.eval, recipe.prompts, recipe.sampling
    benchmarks = _attempt(lambda: find_benchmarks(settings, prompts), findings) or ()
    local = [
        each
        for each in benchmarks
        if each.source == "builtin" or _attempt(partial(local_file, each, settings), findings)
    ]
    if not local or len(local) < len(benchmarks) or tokenizer is None:
        return None
    whole = tokenizer, settings, prompts, sampling, recipe.reward.correct
    return _attempt(lambda: plan_evaluation(*whole), findings)


def _check_room(
    known: Recipe, longest_prompt: int | None, longest_evaluated: int, findings: Findings
) -> None:
    """Whether prompts and completions fit in the model, by the rule that a run applies when it
    starts. `longest_prompt` is None if the prompts were not read; `longest_evaluated` is that of
    the benchmarks, 1 if they were not read."""
    from grpo_replay.sampling.sampler_protocol import check_room, model_length

    try:
        room = model_length(known.sampling, known.model, known.longest_sequence)
    except GrpoReplayError:
        return  # reported with the sizes of the model
    completion, before = known.sampling.max_completion_length, len(findings.problems)
    if longest_prompt is not None or completion >= room:
        prompt = 1 if longest_prompt is None else longest_prompt
        _attempt(lambda: check_room(known, prompt), findings)
    elif known.prompts.max_prompt_length + completion > room > completion:
        findings.unchecked.append(
            f"prompts of more than {room - completion} tokens: with a completion of {completion} "
            f"they would exceed the {room} tokens that {known.model.path} has room for, and the "
            "run would stop at its start"
        )
    said = known.eval.max_completion_length is None and len(findings.problems) > before
    if known.eval.benchmarks and not said:
        _attempt(lambda: check_room(known, longest_evaluated, evaluates=True), findings)


def check_rewards(
    section: RewardSection,
    of_eval: str | None,
    prompts: "PromptSet | None",
    evaluation: "EvaluationPlan | None",
    machines: Machines,
    findings: Findings,
) -> None:
    """Load and try the reward functions in a worker process, as a run does, and that of evaluations
    (None: nothing is evaluated). Without prompts and without a plan of the evaluations, which only
    the run will read, functions are only loaded. The number of workers is only compared with the
    cores of the machine of the run."""
    from grpo_replay.training.reward_watch import notices_of_verifier

    sampled = () if prompts is None else prompts.sample(CHECKED_ANSWERS)
    total = 0 if prompts is None else len(prompts)
    try:
        if not machines.elsewhere:
            findings.assumptions += notices_of_workers(section.workers, max(machines.ranks))
        _try_rewards(section, Sample(sampled, total, "prompts.source"), findings)
        if of_eval is not None and evaluation is not None:
            notices = notices_of_verifier(of_eval, section, evaluation)
            findings.assumptions += [each for each in notices if each not in findings.assumptions]
        elif of_eval is not None and of_eval not in BUILTIN_VERIFIERS:
            _try_rewards(section.alone(of_eval), Sample((), 0, "eval.benchmarks"), findings)
    except GrpoReplayError as error:
        findings.refuse(error)


def _try_rewards(section: RewardSection, sample: Sample, findings: Findings) -> None:
    if not sample.problems and all(f.function in BUILTIN_VERIFIERS for f in section.functions):
        return
    with RewardScorer.open(section.model_copy(update={"workers": 1})) as scorer:
        scorer.wait_ready()
        findings.assumptions += try_rewards(section, scorer, sample)
