"""Validation shared by all samplers: impossible requests, and sampling without complete weights."""

from grpo_replay.errors import RecipeError, SamplerError
from grpo_replay.types import GenerationRequest


def refuse_impossible(
    request: GenerationRequest, vocabulary: int, longest: int | None, limit: str
) -> None:
    """Raises SamplerError for an invalid request, RecipeError for one of more than `longest` tokens
    (None: no limit). `limit` describes that limit in the message."""
    key, prompt = tuple(request.key), request.prompt_token_ids
    if len(prompt) == 0 or request.max_tokens < 1:
        raise SamplerError(
            f"request {key}: {len(prompt)} prompt tokens and max_tokens {request.max_tokens}; "
            "both must be at least 1"
        )
    if int(prompt.min()) < 0 or int(prompt.max()) >= vocabulary:
        raise SamplerError(
            f"request {key}: prompt token ids {int(prompt.min())}..{int(prompt.max())} lie "
            f"outside the model's vocabulary of {vocabulary}: the tokenizer is another model's"
        )
    if longest is not None and len(prompt) + request.max_tokens > longest:
        raise RecipeError(
            f"request {key}: {len(prompt)} prompt tokens and max_tokens {request.max_tokens} "
            f"exceed {limit} lower sampling.max_completion_length (eval.max_completion_length "
            "where an evaluation asks), or prompts.max_prompt_length"
        )


class WeightState:
    """Tracks whether a sampler can sample: it is open, its last weight update is complete, and the
    weights were not discarded since."""

    def __init__(self) -> None:
        self._incomplete: int | None = None
        self._discarded = False
        self._closed = False

    def begin(self, version: int, held: int) -> None:
        """Start an update of a sampler at version `held`. Raises SamplerError if the sampler is
        closed or `version` does not increase."""
        self.refuse_closed()
        if version <= held:
            raise SamplerError(
                f"weights of version {version} offered to a sampler at version {held}: "
                "versions must increase"
            )
        self._incomplete = version

    def complete(self) -> int:
        """Finish the update and return its version."""
        version, self._incomplete = self._incomplete, None
        assert version is not None, "no update began"
        self._discarded = False
        return version

    def discard(self) -> None:
        """Mark the weights as dropped: a complete update must come before sampling."""
        self._discarded = True

    def close(self) -> None:
        self._closed = True

    def refuse_closed(self) -> None:
        if self._closed:
            raise SamplerError("the sampler is closed; open another one")

    def refuse_incomplete(self) -> None:
        """Raises SamplerError if there is nothing to sample from: an update began and did not
        complete, the weights were discarded, or the sampler is closed."""
        self.refuse_closed()
        if self._incomplete is not None:
            raise SamplerError(
                f"the update to weights of version {self._incomplete} was left incomplete; load a "
                "complete set before generating"
            )
        if self._discarded:
            raise SamplerError(
                "the weights were discarded when the sampler went to sleep; load a complete set "
                "before generating"
            )
