"""What bounds a completion: the tokens that end it, and the room that a sampler has."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from grpo_replay.engine.models import eos_token_ids, load_config
from grpo_replay.errors import RecipeError, did_you_mean
from grpo_replay.recipe import EvalSection, ModelSection, SamplingSection


def find_stop_tokens(
    wanted: Sequence[str] | None, section: ModelSection, tokenizer: PreTrainedTokenizerBase
) -> tuple[int, ...]:
    """The ids of `sampling.stop_tokens`, ascending. If that is null, `eos_token_ids` of `section`,
    the model that is sampled. The same in training and evaluation, for every sampler.

    A text is the token of that name, or else the one token that it encodes to: a newline is `\n`,
    also where the tokenizer calls it `Ċ`. Raises RecipeError for a text that is not one token.
    """
    if wanted is None:
        return eos_token_ids(section, tokenizer)
    vocabulary = tokenizer.get_vocab()
    ids: set[int] = set()
    for token in wanted:
        encoded = [vocabulary[token]] if token in vocabulary else _encoded(token, tokenizer)
        if len(encoded) != 1:
            usual = tokenizer.convert_ids_to_tokens(list(eos_token_ids(section, tokenizer)))
            raise RecipeError(
                f"sampling.stop_tokens: {token!r} is not a token of the tokenizer"
                f"{did_you_mean(token, tokenizer.get_added_vocab())}; name whole tokens by their "
                f"text (null would be {', '.join(usual)})"
            )
        ids.update(encoded)
    return tuple(sorted(ids))


def _encoded(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids of a text; none if they do not decode to it, as where a character is unknown."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return ids if tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text else []


def model_length(sampling: SamplingSection, section: ModelSection, longest: int) -> int:
    """Tokens of prompt plus completion that a sampler of the model `section` has room for.

    This is `sampling.longest_asked` if set. Otherwise it is `longest`, the longest sequence of
    training and evaluation, but at most the number of positions of the model.
    Raises RecipeError if what is asked for exceeds the positions.
    """
    positions = getattr(load_config(section), "max_position_embeddings", None)
    wanted = sampling.longest_asked
    if wanted is None:
        return min(longest, positions or longest)
    if positions is not None and wanted > positions:
        raise RecipeError(
            f"sampling.vllm.max_model_len {wanted} exceeds the {positions} positions of "
            f"{section.path}: lower it, or leave it null to derive it"
        )
    return wanted


def check_training_room(
    sampling: SamplingSection, section: ModelSection, longest: int, longest_prompt: int
) -> None:
    """Raises RecipeError if the longest prompt, in tokens, and the longest completion of training
    are more than the sampler has room for (`model_length`)."""
    _check_room(
        model_length(sampling, section, longest),
        section.path,
        longest_prompt,
        sampling.max_completion_length,
        "sampling.max_completion_length, or prompts.max_prompt_length (longer prompts are left "
        "out)",
    )


def check_evaluation_room(
    sampling: SamplingSection,
    section: ModelSection,
    longest: int,
    longest_prompt: int,
    evaluation: EvalSection,
) -> None:
    """Raises RecipeError if the longest prompt of the benchmarks, in tokens, and the longest
    completion of an evaluation are more than the sampler has room for."""
    of_eval = evaluation.max_completion_length
    key = "eval" if of_eval is not None else "sampling"
    _check_room(
        model_length(sampling, section, longest),
        section.path,
        longest_prompt,
        of_eval or sampling.max_completion_length,
        f"{key}.max_completion_length for the evaluation",
    )


def _check_room(room: int, path: str, prompt: int, completion: int, remedy: str) -> None:
    if prompt + completion > room:
        raise RecipeError(
            f"a prompt of {prompt} tokens and a completion of up to {completion} are "
            f"{prompt + completion} tokens; {path} has room for {room} (its positions, or "
            f"sampling.vllm.max_model_len): lower {remedy}"
        )
