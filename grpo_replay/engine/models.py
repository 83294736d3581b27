"""Loads models and tokenizers: shipped ones, local folders, the hub and random initialisations; and
drops settings of theirs that training cannot keep.

Nothing here touches the network for a local folder or a `builtin:` name.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import cached_file

from grpo_replay.engine.policy_module import use_fp32_head
from grpo_replay.errors import ModelError, NotFetchedError, RecipeError, did_you_mean, first_line
from grpo_replay.hub import use_cache_without_hub
from grpo_replay.recipe import ModelSection
from grpo_replay.recipe.layers import short_path
from grpo_replay.storage.checkpoint import list_checkpoints
from grpo_replay.tiny import BASES

BUILTIN_MODELS = (*BASES, "qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen2.5-7b")
"""Names after `builtin:` of model.path. Only the tiny ones have weights and a tokenizer."""

BYTE_TOKENIZER = "builtin:bytes"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

QWEN_STOP_TOKENS = ("<|im_end|>", "<|endoftext|>")
"""Both end a Qwen turn, but base and chat configurations name one each (QwenLM/Qwen3#927)."""

OWN_SETTINGS = "own_settings"
"""Attribute of a loaded policy with the content of the config.json that it was made from."""

_PACKAGE = Path(__file__).resolve().parent.parent
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
_Loaded = TypeVar("_Loaded")


def resolve_model_path(path: str) -> str:
    """Return the folder of a `builtin:` model; any other path or hub id unchanged.

    Raises ModelError for an unknown builtin name or a builtin whose files are missing.
    """
    if not path.startswith("builtin:"):
        return path
    name = path.removeprefix("builtin:")
    if name not in BUILTIN_MODELS:
        known = ", ".join(f"builtin:{model}" for model in BUILTIN_MODELS)
        raise ModelError(f"model.path {path!r}: no such builtin model; there are: {known}")
    folder = BASES[name] if name in BASES else _PACKAGE / "models" / name
    if not folder.is_dir():
        raise ModelError(f"model.path {path!r}: {folder} is missing; reinstall grpo-replay")
    return str(folder)


def section_at(model: ModelSection, model_path: str) -> ModelSection:
    """Returns the section with its weights at `model_path`; unchanged if that is its own path."""
    if model_path in (model.path, resolve_model_path(model.path)):
        return model
    return model.model_copy(update={"path": model_path, "revision": None, "random_init": False})


def load_tokenizer(model: ModelSection) -> PreTrainedTokenizerBase:
    """Load `model.tokenizer`, or the model's own tokenizer. Without a pad token, EOS becomes it.

    Raises ModelError if there is none, it cannot be read, or it has no EOS token.
    """
    name = model.tokenizer or model.path
    if name == BYTE_TOKENIZER:
        return byte_tokenizer()
    setting = f"model.{'tokenizer' if model.tokenizer else 'path'} {short_path(name)!r}"
    source = resolve_model_path(name)
    _check_local(source, setting)
    if not model.tokenizer:
        _check_model_folder(Path(source), setting)
    if Path(source).is_dir() and not any((Path(source) / f).is_file() for f in _TOKENIZER_FILES):
        raise ModelError(
            f"{setting}: no tokenizer in {source} (looked for {', '.join(_TOKENIZER_FILES)}); "
            f"set model.tokenizer to a hub id, a folder or {BYTE_TOKENIZER}"
        )
    # The revision is the model's; a tokenizer from elsewhere has revisions of its own.
    origin = model.model_copy(update={"revision": None}) if model.tokenizer else model
    tokenizer = _load(AutoTokenizer.from_pretrained, source, setting, "tokenizer", origin)
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"{setting}: the tokenizer has no EOS token, so no completion could end: set eos_token "
            "in its tokenizer_config.json (sampling.stop_tokens adds to it)"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_config(model: ModelSection) -> PreTrainedConfig:
    """Load the model's configuration, with the values that `random_init` replaces.

    Raises ModelError if it cannot be read; RecipeError for an unknown or invalid override.
    """
    setting = f"model.path {short_path(model.path)!r}"
    source = resolve_model_path(model.path)
    _check_local(source, setting)
    _check_model_folder(Path(source), setting)
    config = _load(AutoConfig.from_pretrained, source, setting, "config.json", model)
    if config.get_text_config() is not config:
        raise ModelError(
            f"{setting}: {config.model_type} is not a model of text alone (its text model is "
            f"{config.get_text_config().model_type}): save that one, with its own config.json, as "
            "the folder to train"
        )
    return _overridden(config, model.config_overrides) if model.config_overrides else config


def base_digest(model: PreTrainedModel) -> str:
    """Compute the SHA-256 of about a thousand values of every parameter, rounded to bfloat16, which
    identifies a base model: the same if it is loaded in another dtype or from another folder."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        values = parameter.detach().flatten()
        sample = values[:: max(1, len(values) // 1000)].bfloat16().view(torch.int16)
        digest.update(name.encode() + sample.numpy().tobytes())
    return digest.hexdigest()


def refuse_other_base(model: ModelSection, expected: str, digest: str) -> None:
    """Raises ModelError if the base model is not the one that the run began with, by its digest:
    adapters are trained on it, the KL term refers to it, and a checkpoint's card names it."""
    if expected not in ("", digest):
        raise ModelError(
            f"model.path {short_path(model.path)!r} is another model than the one that the run "
            "began with: set model.path to that one, wherever it is, or start a new run"
        )


def load_policy(model: ModelSection, seed: int, fp32_head: bool = False) -> PreTrainedModel:
    """Load the causal model on the CPU, in the section's dtype, evaluation mode, without dropout.

    With `random_init` the weights are a function of configuration and `seed`, and the global
    random state is left as it was. Raises ModelError if weights are missing, broken or do not fit.
    """
    config = load_config(model)
    tokenizer = load_tokenizer(model)
    check_vocabulary(model, config, tokenizer)
    check_attention(model)
    if model.random_init:
        policy = _random(model, config, tokenizer, seed)
    else:
        policy = _pretrained(model, config)
    switch_off_dropout(policy)
    if fp32_head:
        use_fp32_head(policy)
    setattr(policy, OWN_SETTINGS, _own_settings(model))
    return policy.eval()


def _own_settings(model: ModelSection) -> dict[str, Any]:
    source, setting = resolve_model_path(model.path), f"model.path {short_path(model.path)!r}"
    return _load(PreTrainedConfig.get_config_dict, source, setting, "config.json", model)[0]


def _random(
    model: ModelSection, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, seed: int
) -> PreTrainedModel:
    """Builds a model with random weights by `seed`, and the tokenizer's special tokens."""
    _adopt_special_tokens(config, tokenizer)
    with torch.random.fork_rng(devices=[]), _named_refusals(model):
        torch.manual_seed(seed)
        policy = AutoModelForCausalLM.from_config(
            config,
            dtype=DTYPES[model.dtype],
            attn_implementation=model.attn_implementation,
            trust_remote_code=model.trust_remote_code,
        )
    _adopt_special_tokens(policy.generation_config, tokenizer)
    return policy


def eos_token_ids(model: ModelSection | str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the token ids that end a completion, ascending: the tokenizer's EOS, Qwen's two if it
    has them, and those of generation_config.json and config.json, unless the section has another
    tokenizer or `random_init`: then their ids are of a vocabulary that is not used."""
    ids = {int(tokenizer.eos_token_id)}
    added = tokenizer.get_added_vocab()
    ids.update(added[token] for token in QWEN_STOP_TOKENS if token in added)
    section = ModelSection(path=model) if isinstance(model, str) else model
    if section.tokenizer is None and not section.random_init:
        for file in ("generation_config.json", "config.json"):
            ids.update(_eos_in_file(section, file))
    return tuple(sorted(ids))


def _eos_in_file(model: ModelSection, name: str) -> Iterable[int]:
    """Returns the EOS ids in one JSON file of the model; none without the file or the key."""
    source = resolve_model_path(model.path)
    try:
        file = cached_file(
            source,
            name,
            revision=model.revision,
            local_files_only=Path(source).is_dir(),
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        value = json.loads(Path(file).read_text())["eos_token_id"] if file else None
    except KeyError:
        return ()
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(f"{source}: {name} cannot be read: {first_line(error)}") from error
    if value is None:
        return ()
    return [int(token_id) for token_id in (value if isinstance(value, list) else [value])]


def _load(
    loader: Callable[..., _Loaded],
    source: str,
    setting: str,
    content: str,
    model: ModelSection,
    **options: Any,
) -> _Loaded:
    """Calls a `from_pretrained` method for a local folder or hub id `source`. Raises ModelError,
    which names the recipe's setting, if the content ("weights") cannot be loaded."""
    local = Path(source).is_dir()
    if not local:
        use_cache_without_hub()
    try:
        return loader(
            source,
            revision=None if local else model.revision,
            trust_remote_code=model.trust_remote_code,
            local_files_only=local,
            **options,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = first_line(error).rstrip(".")
        if local:
            problem = f"{content} in {source} cannot be loaded: {reason}"
            raise ModelError(f"{setting}: {problem}") from error
        raise _not_fetched(setting, content, source, reason) from error


def _not_fetched(setting: str, content: str, source: str, reason: str) -> NotFetchedError:
    return NotFetchedError(
        f"{setting}: {content} is neither in the local cache nor could it be fetched from the "
        f"hub: {reason}. Where there is a network, run `hf download {source} "
        f"--local-dir DIR` (config.json, generation_config.json, tokenizer files, "
        f"*.safetensors) and set model.path to DIR"
    )


def _check_model_folder(folder: Path, setting: str) -> None:
    """Raises ModelError for a folder without a model. The message says what the folder holds."""
    if not folder.is_dir() or (folder / "config.json").is_file():
        return
    if (folder / "adapter_config.json").is_file() or (folder / "adapter").is_dir():
        remedy = "these are adapters alone: merge them into their model, and name its folder"
    else:
        parents = (folder, *reversed(list_checkpoints(folder / "checkpoints")))
        candidates = (parent / "model" for parent in parents)
        saved = next((path for path in candidates if (path / "config.json").is_file()), None)
        remedy = "model.path is a model's folder" + (f": set it to {saved}" if saved else "")
    raise ModelError(f"{setting}: no config.json there; {remedy}")


def _check_local(source: str, setting: str) -> None:
    path = Path(source)
    if path.is_file():
        raise ModelError(f"{setting}: {source} is a file; name the folder that holds config.json")
    looks_local = source.startswith(("/", ".", "~")) or source.count("/") > 1
    if looks_local and not path.is_dir():
        raise ModelError(f"{setting}: no such folder (a hub id has the form owner/name)")


def notices_of_weights(model: ModelSection) -> list[str]:
    """Return a notice if the start will download the weights. Raises ModelError for a folder
    without weights, and if they are not in the cache and HF_HUB_OFFLINE forbids to ask the hub."""
    refuse_missing_weights(model)
    source = resolve_model_path(model.path)
    if model.random_init or Path(source).is_dir() or _are_cached(source, model.revision):
        return []
    if constants.HF_HUB_OFFLINE:
        setting = f"model.path {short_path(model.path)!r}"
        raise _not_fetched(setting, "weights", source, "HF_HUB_OFFLINE is set")
    return [f"weights of {model.path} are not in the local cache: the start downloads them"]


def _are_cached(source: str, revision: str | None) -> bool:
    names = ("model.safetensors", "model.safetensors.index.json")
    paths = (try_to_load_from_cache(source, name, revision=revision) for name in names)
    return any(isinstance(path, str) for path in paths)


def refuse_missing_weights(model: ModelSection) -> None:
    """Raises ModelError for a local folder without weights, unless `random_init` is set."""
    if model.random_init:
        return
    folder = Path(resolve_model_path(model.path))
    if folder.is_dir() and not any(any(folder.glob(pattern)) for pattern in _WEIGHT_PATTERNS):
        raise ModelError(
            f"model.path {short_path(model.path)!r}: no weights in {folder} (looked for "
            f"{', '.join(_WEIGHT_PATTERNS)}); set model.random_init: true to start from random ones"
        )


def _pretrained(model: ModelSection, config: PreTrainedConfig) -> PreTrainedModel:
    """Loads a model with its weights. Raises ModelError for missing weights or tensors."""
    refuse_missing_weights(model)
    setting = f"model.path {short_path(model.path)!r}"
    source = resolve_model_path(model.path)
    with _named_refusals(model):
        policy, report = _load(
            AutoModelForCausalLM.from_pretrained,
            source,
            setting,
            "weights",
            model,
            config=config,
            dtype=DTYPES[model.dtype],
            attn_implementation=model.attn_implementation,
            output_loading_info=True,
        )
    # transformers fills a missing tensor with random numbers and only prints a warning.
    if report["missing_keys"]:
        names = ", ".join(sorted(report["missing_keys"])[:5])
        raise ModelError(
            f"{setting}: the weights lack {len(report['missing_keys'])} tensors of the "
            f"configuration: {names}; the download is incomplete or config.json is another model's"
        )
    return policy


@contextmanager
def _named_refusals(model: ModelSection) -> Iterator[None]:
    """Translate errors of transformers: RecipeError for an attention that the model or this machine
    does not have, ModelError for weights that need a missing package, such as quantised ones."""
    try:
        yield
    except (ImportError, ValueError, ModelError) as error:
        text = str(error)
        is_about_attention = "attention implementation" in text or "FlashAttention" in text
        if not is_about_attention and isinstance(error, ImportError):
            raise ModelError(
                f"model.path {short_path(model.path)!r}: its weights need what is not installed: "
                f"{first_line(error)}; install it, or name a model whose weights are not quantised"
            ) from error
        if not is_about_attention:
            raise
        raise RecipeError(
            f"model.attn_implementation {model.attn_implementation}: {first_line(error)}; sdpa and "
            "eager need no package, and eager fits every model"
        ) from error


def check_attention(model: ModelSection) -> None:
    """Raises RecipeError for an attention that ignores a setting of the model's configuration."""
    config = load_config(model)
    cap = getattr(config, "attn_logit_softcapping", None)
    if cap is not None and model.attn_implementation == "sdpa":
        raise RecipeError(
            f"model.attn_implementation sdpa: torch's attention leaves out the soft cap of "
            f"{config.model_type}'s scores (attn_logit_softcapping {cap}); set it to eager"
        )


def _overridden(config: PreTrainedConfig, overrides: dict[str, Any]) -> PreTrainedConfig:
    """Returns a copy of the configuration with the values of `model.random_init`. Raises
    RecipeError for a key that it does not have, and if the result is not valid."""
    values = config.to_dict()
    for key, value in overrides.items():
        if key not in values:
            raise RecipeError(
                f"model.random_init.{key}: {config.model_type} has no such setting"
                f"{did_you_mean(key, values)}; found value {value!r}"
            )
    # It has one entry per layer, and follows from the number of layers unless it is overridden.
    values.pop("layer_types", None)
    try:
        changed = type(config).from_dict({**values, **overrides})
        heads = getattr(changed, "num_attention_heads", None)
        groups = getattr(changed, "num_key_value_heads", None) or heads
        if heads and heads % groups:
            raise ValueError(
                f"num_attention_heads {heads} is not a multiple of key_value heads {groups}"
            )
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise RecipeError(
            f"model.random_init {overrides}: not a valid {config.model_type} "
            f"configuration: {' '.join(str(error).split())}"
        ) from error
    return changed


def check_vocabulary(
    model: ModelSection, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raises ModelError if the tokenizer has more tokens than the model."""
    if len(tokenizer) > config.vocab_size:
        more = f", or set model.random_init.vocab_size to at least {len(tokenizer)}"
        raise ModelError(
            f"model.tokenizer {model.tokenizer or model.path!r} has {len(tokenizer)} tokens, but "
            f"the configuration of model.path {model.path!r} has vocab_size {config.vocab_size}: "
            f"use the model's own tokenizer{more if model.random_init else ''}"
        )


def _adopt_special_tokens(config: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    config.eos_token_id = tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    with suppress(StrictDataclassError):  # a few configurations take no "none"
        config.bos_token_id = tokenizer.bos_token_id


PAD_TOKEN, EOS_TOKEN = "<|pad|>", "<|eos|>"
PAD_ID, EOS_ID = 256, 257

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer whose token ids are the bytes of UTF-8, plus `PAD_ID` and `EOS_ID`.

    Decoding what was encoded gives the same text. It has a minimal chat template.
    """
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([PAD_TOKEN, EOS_TOKEN])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD_TOKEN,
        eos_token=EOS_TOKEN,
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def _byte_characters() -> list[str]:
    """The printable character that GPT-2's byte-level alphabet gives to each byte, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    shifted = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(shifted)) for byte in range(256)]


def drop_unwritable_settings(policy: PreTrainedModel) -> list[str]:
    """Reduce generation settings that transformers can read but refuses to write (a temperature
    without `do_sample`, say) to their special tokens. Returns a notice if it did."""
    settings = policy.generation_config
    try:
        settings.validate(strict=True)
    except ValueError as error:
        policy.generation_config = GenerationConfig(
            eos_token_id=settings.eos_token_id,
            pad_token_id=settings.pad_token_id,
            bos_token_id=settings.bos_token_id,
        )
        return [
            "checkpoints get only the special tokens of the model's generation settings, because "
            f"transformers cannot write the others: {first_line(error)}"
        ]
    return []


def switch_off_dropout(policy: PreTrainedModel) -> None:
    """Set all dropout probabilities of the policy to 0, so that every forward pass gives a row the
    same log-probs: with dropout, ratios to the behaviour log-probs would be noise. config.json
    keeps its values. Functional dropout reads its probability from attributes such as
    `attention_dropout` and `resid_pdrop`."""
    for module in policy.modules():
        for name, value in list(vars(module).items()):
            is_dropout = "dropout" in name or "pdrop" in name
            is_dropout |= name == "p" and isinstance(module, nn.Dropout)
            if is_dropout and isinstance(value, float) and value > 0:
                setattr(module, name, 0.0)
