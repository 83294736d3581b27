"""Check of rollouts/: the text is the decoded tokens."""

import json
from pathlib import Path
from typing import Any

from grpo_replay.lab.verification.run_files import RunFiles
from grpo_replay.lab.verification.verification_report import Check, Tally
from grpo_replay.storage.rollout_log import read_rollout_table, step_path


def check_texts(run: RunFiles) -> Check:
    """`completion_text` is what the tokenizer of the newest checkpoint makes of the tokens."""
    tally = Tally("texts", "completion_text is the decoded completion_token_ids")
    tokenizer = _tokenizer(run.folder)
    if tokenizer is None:
        tally.notes.append("not compared: no checkpoint has a tokenizer.json that decodes as it is")
        return tally.result()
    for step in run.rows_of_step:
        columns = ["rollout_id", "completion_token_ids", "completion_text"]
        table = read_rollout_table(step_path(run.folder / "rollouts", step), columns)
        ids, tokens, found = (table[name].to_pylist() for name in columns)
        expected = tokenizer.decode_batch(tokens, skip_special_tokens=True)
        for rollout_id, text, decoded in zip(ids, found, expected, strict=True):
            tally.expect(
                text == decoded,
                f"step {step}, rollout {rollout_id}: completion_text {_short(text)}, its tokens "
                f"decode to {_short(decoded)}",
            )
    return tally.result()


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:59]}…")


def _tokenizer(folder: Path) -> Any:
    """The newest checkpoint's tokenizer; None if there is none, or if transformers changes what it
    decodes."""
    found = sorted(folder.glob("checkpoints/step_*/model/tokenizer.json"))
    if not found:
        return None
    settings = found[-1].with_name("tokenizer_config.json")
    if settings.exists() and json.loads(settings.read_text()).get("clean_up_tokenization_spaces"):
        return None
    # Imported here: the other checks do without.
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(found[-1]))
