"""What a sampler is, how one is opened, what bounds a completion (the tokens that end it, the room
that a sampler has), and what all samplers check.

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
"""Weights gathered at once when a sampler gets new ones."""

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from grpo_replay.distributed.comm import Comm


@dataclass(frozen=True, slots=True)
class SamplerOpening:
    """What a sampler is opened with.

    `model` names the weights of policy version 0: a folder, a hub id or a random initialisation
    with `seed`. `stop_token_ids` end a completion; `longest` is the number of tokens of the longest
    prompt and completion. Ranks wait for each other for `timeout_seconds` at most.
    `pushed_while_sampling` is true in asynchronous runs.
    Servers that it launches log to `log_folder` (a temporary folder if None).
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
        """Whether updates bring LoRA's adapters alone, for the base in `model` (only to a sampler
        of this package)."""
        return self.sampling.takes_adapters(self.model)

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        model_path: str,
        comm: "Comm",
        log_folder: Path | None = None,
    ) -> "SamplerOpening":
        """With the weights in `model_path`, a local folder or hub id. Raises RecipeError."""
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
    `stop_token_ids` are the tokens that end a completion, ascending. If `ranks_sample_together`,
    `generate` is collective. A class that `reads_files` opens weights in a folder only, so no
    random initialisation. It may have a `check` (see `VllmServerSampler`): what `open` would raise
    before weights are read.
    """

    reads_files: ClassVar[bool]
    policy_version: int
    stop_token_ids: tuple[int, ...]
    ranks_sample_together: bool

    @classmethod
    def open(cls, opening: SamplerOpening) -> "Sampler":
        """A sampler with the weights of the opening as policy version 0. Collective. Raises
        ModelError or SamplerError for a model that it cannot sample, SamplerError for an engine or
        a server that it cannot start or reach."""
        ...

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[Completion]:
        """Completions as they finish, in any order, exactly one for each request."""
        ...

    def load_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Replace all weights. Collective: every rank must exhaust `named_tensors`, which gathers
        full tensors one bucket at a time. Tied tensors appear under every name."""
        ...

    def sleep(self, keep_weights: bool = True) -> None:
        """Free device memory until the next `load_weights` or `generate`; may free nothing.

        With `keep_weights` false a `load_weights` must come next: `generate` raises SamplerError
        before it. Weights that are kept may take host memory."""
        ...

    def close(self) -> None:
        """Stop threads and child processes. May be called twice."""
        ...


def sampler_class(sampling: SamplingSection) -> type[Sampler]:
    """The class that `sampling.backend` names; none that samples, if the run replays a journal.
    Raises RecipeError."""
    if sampling.collection.replay_journal is not None:
        return NoSampler
    found: Any = SAMPLERS.load(sampling.backend)
    missing = [name for name in _MEMBERS if not hasattr(found, name)]
    if missing or not isinstance(found, type):
        lacks = f"without {', '.join(missing)}" if missing else "and no class"
        raise RecipeError(
            f"sampling.backend {sampling.backend} is a {type(found).__name__} {lacks}: name a "
            "class with the methods of sampling.sampler_protocol.Sampler"
        )
    return found


_MEMBERS = (
    "reads_files", "open", "generate", "load_weights", "sleep", "close",
)  # fmt: skip


def completions_of(sampler: Sampler, requests: Sequence[GenerationRequest]) -> Iterator[Completion]:
    """What the sampler generates as it comes: one completion for each request. Raises SamplerError
    for anything else, which only a sampler of the user's own returns."""
    wanted = {request.key for request in requests}
    for completion in sampler.generate(requests):
        problem = _problem_of(completion) if completion.key in wanted else "a key that is not asked"
        if problem:
            raise SamplerError(
                f"{type(sampler).__name__}.generate: the completion of {completion.key} has "
                f"{problem}; give one completion for each request"
            )
        wanted.remove(completion.key)
        yield completion
    if wanted:
        raise SamplerError(
            f"{type(sampler).__name__}.generate: no completion for {len(wanted)} of "
            f"{len(requests)} requests, among them {min(wanted)}"
        )


def _problem_of(completion: Completion) -> str | None:
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
    """The sampler that `recipe.sampling.backend` names, with the weights in `model_path`.
    Collective."""
    found = sampler_class(recipe.sampling)
    return found.open(SamplerOpening.of(recipe, model_path, comm, log_folder))


class NoSampler:
    """For a run that is replayed from its journal. Weights are not taken over: no rank gathers
    them."""

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
    """Tracks whether a sampler can sample: its last weight update is complete, and the weights were
    not discarded since."""

    def __init__(self) -> None:
        self._reason: str | None = None  # why there is nothing to sample from

    def begin(self, version: int, held: int) -> None:
        """Start an update of a sampler at version `held`. Raises SamplerError if `version` does not
        increase."""
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
        """Mark the weights as dropped: a complete update must come before sampling."""
        self._reason = self._reason or "the weights were discarded when the sampler went to sleep"

    def refuse_incomplete(self) -> None:
        """Raises SamplerError if there is nothing to sample from: an update began and did not
        complete, or the weights were discarded."""
        if self._reason is not None:
            raise SamplerError(f"{self._reason}; load a complete set before generating")


def find_stop_tokens(
    wanted: Sequence[str] | None, section: ModelSection, tokenizer: "PreTrainedTokenizerBase"
) -> tuple[int, ...]:
    """The ids of `sampling.stop_tokens`, ascending. If that is null, `eos_token_ids` of `section`,
    the model that is sampled. The same in training and evaluation, for every sampler.

    A text is the token of that name, or else the one token that it encodes to: a newline is `\n`,
    also where the tokenizer calls it `Ċ`. Raises RecipeError for a text that is not one token.
    """
    from grpo_replay.engine.models import eos_token_ids

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


def name_stop_tokens(ids: Sequence[int], tokenizer: "PreTrainedTokenizerBase") -> str:
    """The tokens that end a completion, as text and id: `<|im_end|> (2)`."""
    texts = tokenizer.convert_ids_to_tokens(list(ids))
    return " or ".join(f"{text} ({each})" for text, each in zip(texts, ids, strict=True))


def _encoded(text: str, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """The ids of a text; none if they do not decode to it, as where a character is unknown."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return ids if decoded(tokenizer, ids) == text else []


def model_length(
    sampling: SamplingSection,
    section: ModelSection,
    longest: int,
    config: "PreTrainedConfig | None" = None,
) -> int:
    """Tokens of prompt plus completion that a sampler of the model `section` has room for; `config`
    is its configuration, if it was read already.

    This is vLLM's `sampling.vllm.max_model_len` if set. Otherwise it is `longest`, the longest
    sequence of training and evaluation, but at most the number of positions of the model. Raises
    RecipeError if what is asked for exceeds the positions.
    """
    from grpo_replay.engine.models import load_config

    positions = getattr(config or load_config(section), "max_position_embeddings", None)
    wanted = sampling.vllm.max_model_len if sampling.facts.reads_vllm_settings else None
    if wanted is None:
        return min(longest, positions or longest)
    if positions is not None and wanted > positions:
        raise RecipeError(
            f"sampling.vllm.max_model_len {wanted} exceeds the {positions} positions of "
            f"{section.path}: lower it, or leave it null to derive it"
        )
    return wanted


def check_room(recipe: Recipe, longest_prompt: int, evaluates: bool = False) -> None:
    """Raises RecipeError if the longest prompt, in tokens, and the longest completion of training
    are more than the sampler has room for (`model_length`); those of an evaluation if it
    `evaluates`."""
    of_eval = recipe.eval.max_completion_length if evaluates else None
    completion = of_eval or recipe.sampling.max_completion_length
    key = f"{'eval' if of_eval else 'sampling'}.max_completion_length"
    room = model_length(recipe.sampling, recipe.model, recipe.longest_sequence)
    has = f"{recipe.model.path} has room for {room} (its positions, or sampling.vllm.max_model_len)"
    if completion >= room:
        raise RecipeError(
            f"{key} {completion} leaves no room for a prompt: {has}: lower it to "
            f"{max(1, room - longest_prompt)} or less"
        )
    if longest_prompt + completion > room:
        more = ", or prompts.max_prompt_length (longer prompts are left out)"
        raise RecipeError(
            f"a prompt of {longest_prompt} tokens and a completion of up to {completion} are "
            f"{longest_prompt + completion} tokens; {has}: lower {key}"
            f"{' for the evaluation' if evaluates else more}"
        )
