"""The protocol of a sampler, how one is opened, the limits of a completion (stop tokens and maximum
length), and checks shared by all samplers.

A sampler of your own is a class with these methods and attributes (docs/api.md). The built-in
ones are chosen in the same way (`recipe.open_lists.SAMPLERS`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from grpo_replay.errors import RecipeError, SamplerError, did_you_mean
from grpo_replay.recipe import ModelSection, Recipe, SamplingSection
from grpo_replay.recipe.open_lists import SAMPLERS
from grpo_replay.sampling.completion_text import decoded
from grpo_replay.types import Completion, GenerationRequest, NamedTensors

SYNC_BUCKET_BYTES = 512 * 2**20
"""Bytes of weights that a push gathers at once."""

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from grpo_replay.distributed.comm import Comm


@dataclass(frozen=True, slots=True)
class SamplerOpening:
    """The arguments with which a sampler is opened.

    `model` names the weights of policy version 0: a folder, a hub id or a random initialisation
    with `seed`. `stop_token_ids` end a completion; `longest` is the maximum number of tokens of
    prompt plus completion. `timeout_seconds` limits the wait of ranks for each other.
    `pushed_while_sampling` is true in asynchronous runs. Launched servers log to `log_folder` (a
    temporary folder if None).
    """

    model: ModelSection
    sampling: SamplingSection
    seed: int
    stop_token_ids: tuple[int, ...]
    longest: int
    on_gpu: bool
    comm: "Comm"
    timeout_seconds: float
    pushed_while_sampling: bool = False
    log_folder: Path | None = None

    @property
    def with_adapters(self) -> bool:
        """Whether updates contain only LoRA's adapters (only for samplers of this package)."""
        return self.sampling.takes_adapters(self.model)

    @classmethod
    def from_recipe(
        cls,
        recipe: Recipe,
        model_path: str,
        comm: "Comm",
        log_folder: Path | None = None,
    ) -> "SamplerOpening":
        """Make the arguments for a recipe, with weights from `model_path`, a local folder or hub
        id. Raises RecipeError, also for `random_init` if the sampler reads files."""
        import torch

        from grpo_replay.engine.models import load_tokenizer, section_at

        model = section_at(recipe.model, model_path)
        if model.random_init and sampler_class(recipe.sampling).reads_files:
            raise RecipeError(
                f"model.random_init: sampling.backend {recipe.sampling.backend} reads weights from "
                "files: use hf, or name a folder with saved weights in model.path"
            )
        stop_tokens = recipe.sampling.stop_tokens
        return cls(
            model,
            recipe.sampling,
            recipe.run.seed,
            find_stop_tokens(stop_tokens, model, load_tokenizer(model)),
            recipe.longest_sequence,
            recipe.engine.device != "cpu" and torch.cuda.is_available(),
            comm,
            recipe.engine.timeout_seconds,
            recipe.run.is_async,
            log_folder,
        )


class Sampler(Protocol):
    """Generates completions with its own copy of the weights.

    `policy_version` is the version of the last complete `load_weights`; versions only increase.
    `stop_token_ids` end a completion, ascending. If `ranks_sample_together`, `generate` is
    collective. A class that `reads_files` needs saved weights and refuses a random initialisation.
    An optional `check` (see `VllmServerSampler`) raises, without reading weights, the errors that
    `open` would raise.
    """

    reads_files: ClassVar[bool]
    policy_version: int
    stop_token_ids: tuple[int, ...]
    ranks_sample_together: bool

    @classmethod
    def open(cls, opening: SamplerOpening) -> "Sampler":
        """Open a sampler with the weights of the opening as policy version 0. Collective. Raises
        ModelError or SamplerError if it cannot sample the model, SamplerError if an engine or a
        server does not start or answer."""
        ...

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[Completion]:
        """Yield completions as they finish, in any order, exactly one for each request."""
        ...

    def load_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Replace all weights. Collective: every rank must consume all `named_tensors`, an iterator
        that gathers full tensors bucket by bucket. Tied tensors appear under every name."""
        ...

    def sleep(self, keep_weights: bool = True) -> None:
        """Free device memory until the next `load_weights` or `generate`; may free nothing.

        If `keep_weights` is false, `load_weights` must be called next; before it `generate` raises
        SamplerError. Kept weights may use host memory."""
        ...

    def close(self) -> None:
        """Stop threads and child processes. May be called twice."""
        ...


def sampler_class(sampling: SamplingSection) -> type[Sampler]:
    """Return the class that `sampling.backend` names, or `NoSampler` if the run replays a journal.
    Raises RecipeError if it is not a class with a sampler's members."""
    if sampling.collection.replay_journal is not None:
        return NoSampler
    backend: Any = SAMPLERS.load(sampling.backend)
    missing = [name for name in _MEMBERS if not hasattr(backend, name)]
    if missing or not isinstance(backend, type):
        reason = f"without {', '.join(missing)}" if missing else "and no class"
        raise RecipeError(
            f"sampling.backend {sampling.backend} is a {type(backend).__name__} {reason}: name a "
            "class with the methods of sampling.sampler_protocol.Sampler"
        )
    return backend


_MEMBERS = (
    "reads_files", "open", "generate", "load_weights", "sleep", "close",
)  # fmt: skip


def checked_completions(
    sampler: Sampler, requests: Sequence[GenerationRequest]
) -> Iterator[Completion]:
    """Yield the sampler's completions, one for each request. Raises SamplerError for anything else,
    which only a sampler of the user's own returns."""
    missing = {request.key for request in requests}
    for completion in sampler.generate(requests):
        is_expected = completion.key in missing
        problem = _array_problem(completion) if is_expected else "a key of no open request"
        if problem:
            raise SamplerError(
                f"{type(sampler).__name__}.generate: the completion of {completion.key} has "
                f"{problem}; give one completion for each request"
            )
        missing.remove(completion.key)
        yield completion
    if missing:
        raise SamplerError(
            f"{type(sampler).__name__}.generate: no completion for {len(missing)} of "
            f"{len(requests)} requests, among them {min(missing)}"
        )


def _array_problem(completion: Completion) -> str | None:
    """Describe the problem of a completion's arrays; None if they are valid."""
    tokens = completion.token_ids
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        return "token_ids that are no array of integers [T]"
    for name, kind in (("sampler_logprobs", "f"), ("completion_mask", "b")):
        values = getattr(completion, name)
        if values is None and name == "completion_mask":
            continue
        if not isinstance(values, np.ndarray) or values.dtype.kind != kind:
            return f"{name} that are no array of {'numbers' if kind == 'f' else 'booleans'} [T]"
        if values.shape != tokens.shape:
            return f"{name} of shape {list(values.shape)} for {len(tokens)} tokens"
    return None


def open_sampler(
    recipe: Recipe,
    model_path: str,
    comm: "Comm",
    log_folder: Path | None = None,
) -> Sampler:
    """Open the recipe's sampler (`NoSampler` if the run repeats a journal) with the weights of
    `model_path`, a folder or hub id, in place of `model.path`. Collective."""
    sampler_type = sampler_class(recipe.sampling)
    return sampler_type.open(SamplerOpening.from_recipe(recipe, model_path, comm, log_folder))


class NoSampler:
    """The sampler of a run that replays a journal: samples nothing, ignores weights."""

    reads_files: ClassVar[bool] = False
    ranks_sample_together = False

    def __init__(self, stop_token_ids: Sequence[int]) -> None:
        self.policy_version = 0
        self.stop_token_ids = tuple(stop_token_ids)

    @classmethod
    def open(cls, opening: SamplerOpening) -> "NoSampler":
        return cls(opening.stop_token_ids)

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[Completion]:
        raise SamplerError("a run with sampling.collection.replay_journal samples nothing")

    def load_weights(self, named_tensors: NamedTensors, version: int) -> None:
        self.policy_version = version

    def sleep(self, keep_weights: bool = True) -> None:
        pass

    def close(self) -> None:
        pass


def refuse_impossible(
    request: GenerationRequest, vocabulary: int, longest: int | None, limit: str
) -> None:
    """Raises SamplerError for an invalid request, RecipeError for one of more than `longest` tokens
    (None: no limit). `limit` describes the limit in the message."""
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
    """Tracks whether a sampler's last weight update is complete and not discarded since."""

    def __init__(self) -> None:
        self._reason: str | None = None  # why it cannot sample

    def begin(self, version: int, held: int) -> None:
        """Start an update from version `held`. Raises SamplerError unless `version` is higher."""
        if version <= held:
            raise SamplerError(
                f"weights of version {version} offered to a sampler at version {held}: "
                "versions must increase"
            )
        self._reason = f"the update to weights of version {version} was left incomplete"

    def complete(self) -> None:
        """Finish the update."""
        self._reason = None

    def discard(self) -> None:
        """Mark the weights as discarded: the next sampling needs a complete update before it."""
        self._reason = self._reason or "the weights were discarded when the sampler went to sleep"

    def refuse_incomplete(self) -> None:
        """Raises SamplerError if an update is incomplete, or the weights were discarded."""
        if self._reason is not None:
            raise SamplerError(f"{self._reason}; load a complete set before generating")


def find_stop_tokens(
    texts: Sequence[str] | None, section: ModelSection, tokenizer: "PreTrainedTokenizerBase"
) -> tuple[int, ...]:
    """Return the ids of the stop tokens `texts` (`sampling.stop_tokens`), ascending; if None, the
    `eos_token_ids` of the model. The same in training and evaluation, for every sampler.

    A text is the name of a token, or else text that encodes to one token: `\n` is a newline even
    if the tokenizer names it `Ċ`. Raises RecipeError for a text that is not one token.
    """
    from grpo_replay.engine.models import eos_token_ids

    if texts is None:
        return eos_token_ids(section, tokenizer)
    vocabulary = tokenizer.get_vocab()
    ids: set[int] = set()
    for token in texts:
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


def name_stop_tokens(ids: Sequence[int], tokenizer: "PreTrainedTokenizerBase") -> str:
    """Format the tokens that end a completion, as text and id: `<|im_end|> (2)`."""
    texts = tokenizer.convert_ids_to_tokens(list(ids))
    return " or ".join(f"{text} ({token})" for text, token in zip(texts, ids, strict=True))


def _encoded(text: str, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Returns the ids of a text; empty if they do not decode to it (an unknown character)."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return ids if decoded(tokenizer, ids) == text else []


def model_length(
    sampling: SamplingSection,
    section: ModelSection,
    longest: int,
    config: "PreTrainedConfig | None" = None,
) -> int:
    """Return the maximum tokens of prompt plus completion of a sampler for the model `section`;
    `config` is the model's configuration, if already read.

    This is vLLM's `sampling.vllm.max_model_len` if set, else `longest`, the longest sequence of
    training and evaluation, but at most the number of positions of the model. Raises RecipeError if
    `max_model_len` exceeds the positions.
    """
    from grpo_replay.engine.models import load_config

    positions = getattr(config or load_config(section), "max_position_embeddings", None)
    max_model_len = sampling.vllm.max_model_len if sampling.facts.reads_vllm_settings else None
    if max_model_len is None:
        return min(longest, positions or longest)
    if positions is not None and max_model_len > positions:
        raise RecipeError(
            f"sampling.vllm.max_model_len {max_model_len} exceeds the {positions} positions of "
            f"{section.path}: lower it, or leave it null to derive it"
        )
    return max_model_len


def check_room(recipe: Recipe, longest_prompt: int, evaluates: bool = False) -> None:
    """Raises RecipeError if the longest prompt plus the longest completion, in tokens, exceed the
    maximum length of the sampler (`model_length`). `evaluates` checks those of an evaluation."""
    eval_limit = recipe.eval.max_completion_length if evaluates else None
    completion = eval_limit or recipe.sampling.max_completion_length
    key = f"{'eval' if eval_limit else 'sampling'}.max_completion_length"
    room = model_length(recipe.sampling, recipe.model, recipe.longest_sequence)
    has = f"{recipe.model.path} has room for {room} (its positions, or sampling.vllm.max_model_len)"
    if completion >= room:
        raise RecipeError(
            f"{key} {completion} leaves no room for a prompt: {has}: lower it to "
            f"{max(1, room - longest_prompt)} or less"
        )
    if longest_prompt + completion > room:
        remedy = ", or prompts.max_prompt_length (longer prompts are left out)"
        raise RecipeError(
            f"a prompt of {longest_prompt} tokens and a completion of up to {completion} are "
            f"{longest_prompt + completion} tokens; {has}: lower {key}"
            f"{' for the evaluation' if evaluates else remedy}"
        )
