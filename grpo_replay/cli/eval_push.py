"""`grpo-replay eval --push-to-hub`: push the evaluated model, or offline list what would be."""

import sys
from pathlib import Path

from huggingface_hub import constants, is_offline_mode
from huggingface_hub.utils import enable_progress_bars

from grpo_replay.errors import HubError
from grpo_replay.evaluation.evaluation_report import EvaluationReport
from grpo_replay.evaluation.hub_card import evaluated_card
from grpo_replay.evaluation.hub_push import HubPush, planned_push, upload
from grpo_replay.evaluation.model_source import ModelSource
from grpo_replay.recipe import load_recipe


def push_evaluated(
    source: ModelSource,
    report: EvaluationReport,
    output: Path,
    repo_id: str,
    public: bool,
    as_json: bool,
) -> None:
    """Push the model with a card of its evaluation; offline, print what would be pushed.

    With `as_json` the lines go to stderr. Raises HubError; the evaluation in `output` stays.
    """
    recipe = load_recipe(str(source.recipe)) if source.recipe is not None else None
    card = evaluated_card(repo_id, report, recipe, source.step)
    push = planned_push(source, repo_id, public, card)
    stream = sys.stderr if as_json else sys.stdout
    if is_offline_mode():
        print("\n".join(_offline_lines(push)), file=stream)
        return
    count, total = len(push.files), sum(push.sizes().values())
    print(f"pushing {count} files, {total:,} bytes, to {repo_id}", file=sys.stderr)
    if sys.stderr.isatty() and constants.HF_HUB_DISABLE_PROGRESS_BARS is None:
        enable_progress_bars()  # hidden while the model was loaded
    try:
        url = upload(push, f"{source.name}, evaluated by grpo-replay")
    except HubError as error:
        error.add_note(
            f"the evaluation is kept in {output}; the same command pushes without sampling again"
        )
        raise
    print(f"pushed: {url}", file=stream)


def _offline_lines(push: HubPush) -> list[str]:
    sizes = push.sizes()
    total, kind = sum(sizes.values()), "public" if push.public else "private"
    width = len(f"{total:,}")
    return [
        f"offline (HF_HUB_OFFLINE), so nothing was pushed. To {push.repo_id}, {kind} if new:",
        *(f"  {size:>{width},} bytes  {name}" for name, size in sizes.items()),
        f"  {total:>{width},} bytes  in {len(sizes)} files",
    ]
