"""The tiny base with `<answer>` and `</answer>` as special tokens, and reward functions that look
for them: `reward.function: tagged_model.py:has_tag`."""

from pathlib import Path

TAGS = ("<answer>", "</answer>")


def save_tagged(folder: Path) -> Path:
    """Each tag is sampled about as often as a digit, and never leads to a right answer."""
    import torch

    from grpo_replay.engine.models import load_policy, load_tokenizer
    from grpo_replay.recipe import ModelSection

    model, tokenizer = load_policy(ModelSection(), 0), load_tokenizer(ModelSection())
    tokenizer.add_special_tokens({"additional_special_tokens": list(TAGS)})
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        for tag, like in zip(TAGS, "12", strict=True):
            weight[tokenizer.convert_tokens_to_ids(tag)] = weight[
                tokenizer.convert_tokens_to_ids(like)
            ]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def has_tag(completion: str, answer: str) -> float:
    return float("</answer>" in completion)


def has_tag_id(completion_ids: list[int], completion: str) -> float:
    return float(25 in completion_ids)


def lengths(completions: list[str], completion_ids: list[list[int]]) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]
