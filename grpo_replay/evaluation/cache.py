"""Cached generations on disk: an interrupted or extended evaluation samples only what is missing.

Every rank appends its own shards to one folder, which concurrent evaluations may share. A row is
identified by the digest of prompt tokens, seed, temperature, top-p and token limit. A folder
belongs to one model, backend version, device type, precision, tokenizer, set of stop tokens and
`sampler_facts`.
"""

import hashlib
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq

from grpo_replay.recipe import ModelSection, SamplingSection, VllmSection
from grpo_replay.recipe.open_lists import SAMPLERS
from grpo_replay.storage.atomic import named_if_unwritable, written_whole
from grpo_replay.storage.run_directory import installed_versions
from grpo_replay.types import Completion, GenerationRequest

FLUSH_ROWS = 512
FLUSH_SECONDS = 20.0

GENERATION_SCHEMA = pa.schema(
    [
        ("request", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("finish_reason", pa.string()),
    ],
    metadata={"grpo_replay_generations": "1"},
)


def request_digest(request: GenerationRequest) -> str:
    """Returns the digest of everything that determines a completion, except the model."""
    settings = [request.seed, request.temperature, request.top_p, request.max_tokens]
    digest = hashlib.blake2b(json.dumps(settings).encode(), digest_size=16)
    digest.update(np.ascontiguousarray(request.prompt_token_ids, dtype="<i4").tobytes())
    return digest.hexdigest()


def sampler_facts(sampling: SamplingSection) -> dict[str, Any]:
    """Return further settings of a sampler that may change completions, for the `model` section of
    a report: `sampler_options`, the user's own vLLM arguments if the backend reads them, and
    `sampler_sha256`, of the source file of a user's sampler (None for others)."""
    vllm = sampling.vllm
    left_out = {*VllmSection.model_fields, "hf_token"}  # a secret
    options = vllm.model_dump(mode="json", exclude=left_out)
    if not sampling.facts.reads_vllm_settings:
        options = {"hf_overrides": {"head_dtype": "float32"}} if sampling.fp32_head else {}
    digest = None
    if sampling.backend not in SAMPLERS.names:
        from grpo_replay.rewards.verifier_worker import source_digest

        digest = source_digest(sampling.backend)
    return {"sampler_options": options, "sampler_sha256": digest}


def generations_folder(
    parent: Path,
    model_sha256: str,
    dtype: str,
    device: str,
    model: ModelSection,
    sampling: SamplingSection,
) -> Path:
    """Return the folder under `parent` for the completions of a model on a backend, in `dtype`; its
    name is a digest of all that may change completions."""
    facts = {
        "backend": sampling.backend,
        **_installed(sampling, device),
        "dtype": dtype,
        "tokenizer": model.tokenizer,  # if null the model's own, which the SHA-256 covers
        "stop_tokens": sampling.stop_tokens and sorted(set(sampling.stop_tokens)),  # as above
        **sampler_facts(sampling),
        **({"lora": sampling.lora} if model.lora.r is not None else {}),
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return parent / f"{model_sha256[:16]}-{digest[:16]}"


def _installed(sampling: SamplingSection, device: str) -> dict[str, Any]:
    """Returns the versions of the backend, and the device; both are unknown for remote servers."""
    if sampling.facts.on_servers:
        return {}
    import torch

    on_gpu = device != "cpu" and torch.cuda.is_available()
    versions = installed_versions(sampling.facts.packages)
    return {"versions": versions, "device": "cuda" if on_gpu else "cpu"}


def read_generations(folder: Path, digests: Iterable[str]) -> dict[str, tuple[np.ndarray, str]]:
    """Read token ids (int32 [T]) and finish reason of cached completions, by `request_digest`."""
    shards = [str(path) for path in sorted(folder.glob("*.parquet"))]
    if not shards:
        return {}
    is_wanted = pa.dataset.field("request").isin(list(digests))
    table = pa.dataset.dataset(shards, schema=GENERATION_SCHEMA).to_table(filter=is_wanted)
    return {
        row["request"]: (np.array(row["token_ids"], dtype=np.int32), row["finish_reason"])
        for row in table.to_pylist()
    }


class GenerationWriter:
    """Appends completions to `folder` in shards, each written atomically.

    Use it as a context manager: it writes the last shard on exit, also after an error.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rows: list[dict[str, object]] = []
        self._last_flush = time.monotonic()

    def add(self, request: GenerationRequest, completion: Completion) -> None:
        """Add a completion; a shard is written after `FLUSH_ROWS` or `FLUSH_SECONDS`."""
        self._rows.append(
            {
                "request": request_digest(request),
                "token_ids": completion.token_ids,
                "finish_reason": completion.finish_reason,
            }
        )
        if len(self._rows) >= FLUSH_ROWS or time.monotonic() - self._last_flush > FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write the completions since the last shard. Raises OutputDirectoryError."""
        self._last_flush = time.monotonic()
        if not self._rows:
            return
        table = pa.Table.from_pylist(self._rows, schema=GENERATION_SCHEMA)
        path = self._folder / f"{uuid4().hex}.parquet"
        with named_if_unwritable(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            with written_whole(path) as temporary:
                pq.write_table(table, temporary, compression="zstd")
        self._rows.clear()

    def __enter__(self) -> "GenerationWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()
