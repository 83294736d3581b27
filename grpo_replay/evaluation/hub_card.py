"""The README of a model on the hub: where it comes from, what it scored, how it was trained."""

from huggingface_hub import EvalResult, ModelCardData

from grpo_replay import __version__
from grpo_replay.evaluation.evaluation_report import EvaluationReport
from grpo_replay.evaluation.evaluation_tables import heading, legend, markdown_sections
from grpo_replay.recipe import Recipe
from grpo_replay.recipe.paths import is_on_hub

TAGS = ["grpo", "grpo-replay", "rollout-replay"]


def evaluated_card(
    repo_id: str, report: EvaluationReport, recipe: Recipe | None, step: int | None
) -> str:
    """The card of an evaluated model, as Markdown with the hub's metadata.

    `recipe` is the one that the model was trained with, up to `step`; None for a model that is not
    of a run. Local paths of the recipe are left out.
    """
    lines = [
        f"# {repo_id.partition('/')[2]}",
        "",
        _origin(recipe),
        "",
        *(_training(recipe, step) if recipe is not None else []),
        "## Evaluation",
        "",
        f"{heading(report)}.",
        "",
        *(line.replace("## ", "### ", 1) for line in markdown_sections(report)),
        legend(report),
    ]
    return card_metadata(recipe, repo_id, report) + "\n".join(lines) + "\n"


def card_metadata(
    recipe: Recipe | None, repo_id: str | None = None, report: EvaluationReport | None = None
) -> str:
    """The metadata at the top of a card, between lines of dashes. The hub makes links of the names
    of base model and data set; what is not on the hub is left out."""
    base, prompts = (recipe.model.path, recipe.prompts.source) if recipe else ("", "")
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=TAGS,
        base_model=base if base and is_on_hub(base) else None,
        datasets=[prompts] if prompts and is_on_hub(prompts) else None,
        model_name=repo_id,
        eval_results=_eval_results(report) if report is not None else None,
    )
    return f"---\n{data.to_yaml()}\n---\n\n"


def _eval_results(report: EvaluationReport) -> list[EvalResult]:
    """The accuracies in %, in the form that the hub shows beside a model."""
    described = report.settings["benchmarks"]
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=name,
            dataset_name=described.get(name, {}).get("title", name),
            metric_type="accuracy",
            metric_name=f"avg@{result.k}",
            metric_value=round(100 * result.avg_at_k, 2),
        )
        for name, result in report.sampled.benchmarks.items()
    ]


def _origin(recipe: Recipe | None) -> str:
    if recipe is None:
        return f"Evaluated by grpo-replay {__version__}."
    base = _linked(recipe.model.path, "https://huggingface.co/")
    return f"{base}, post-trained with GRPO by grpo-replay {__version__}."


def _training(recipe: Recipe, step: int | None) -> list[str]:
    """The main settings of the recipe, as a table."""
    sampling, replay, lora = recipe.sampling, recipe.replay, recipe.model.lora
    reward = recipe.reward
    rows = {
        "recipe": f"`{recipe.name}`",
        "training steps": f"{step:,}" if step is not None else "unknown",
        "prompts": _linked(recipe.prompts.source, "https://huggingface.co/datasets/"),
        "rollouts per step": f"{sampling.prompts_per_step} prompts × {sampling.group_size}",
        "longest completion": f"{sampling.max_completion_length:,} tokens",
        "reward": " + ".join(f"{each.weight:g} · `{each.name}`" for each in reward.functions),
        "replay": (
            f"preset `{replay.preset}`, ratio {replay.ratio:g}, age limit "
            f"{replay.max_age_steps or 'none'} (steps)"
            if replay.replays
            else "none"
        ),
        "learning rate": f"{recipe.optimizer.learning_rate:g}",
        "trained": "all parameters" if lora.rank is None else f"LoRA, rank {lora.rank}, merged",
        "seed": str(recipe.run.seed),
    }
    table = [f"| {name} | {value} |" for name, value in rows.items()]
    return ["## Training", "", "| | |", "|---|---|", *table, ""]


def _linked(name: str, site: str) -> str:
    """A model or data set: a link if it is on the hub; of a local path the last part."""
    if is_on_hub(name):
        return f"[{name}]({site}{name})"
    return f"`{name if name.startswith('builtin:') else name.rstrip('/').rpartition('/')[2]}`"
