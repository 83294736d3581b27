"""One forward and backward pass at a real vocabulary, beside TRL's and Liger's: memory and seconds.

    pip install trl==1.16.0 liger-kernel==0.8.5          # in an environment of its own
    python benchmarks/head_against_trl.py                # 4 x 1,024 tokens in fp32, ten minutes
    python benchmarks/head_against_trl.py --rows 1 --tokens 512 --chunk 128       # an eighth of it
    python benchmarks/head_against_trl.py --device meta --dtype bfloat16          # memory only
    python benchmarks/head_against_trl.py --device cuda --dtype bfloat16 --layers 28

A random Qwen3 of the width and the vocabulary (151,936) of Qwen3-0.6B gets the same rows and the
same loss from four heads: `ours` (engine/policy_module.py), `trl` (the default of TRL 1.16, which
computes log-probs in tiles of the vocabulary), `liger` (Liger's fused linear GRPO loss, which
returns neither log-probs nor entropies; not on the meta device), and `logits`, which keeps all of
them. Each runs in a process of its own, once to warm up with a short row and once measured.
Memory is the peak of the resident set over that of the model, gradients included (glibc returns
freed memory at once), on CUDA that of live tensors, and on the meta device, where nothing is
computed, the bytes of live tensors as `lab/dry_run/trace.py` counts them. The gradient of the
embedding, which is the head's, is compared with that of `logits` (relative L2).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "131072", "HF_HUB_OFFLINE": "1",
    "MALLOC_TRIM_THRESHOLD_": "131072", "TRL_EXPERIMENTAL_SILENCE": "1",
}  # fmt: skip
PROMPT_TOKENS = 16

Scored = tuple[Any, Any]  # log-probs and entropies of the completion tokens, flat
Head = Callable[[Any], Any]  # from token ids [R, L] to the loss


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1024, help="completion tokens of a row")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--chunk", type=int, default=256, help="engine.logprob_chunk_tokens")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", choices=("cpu", "cuda", "meta"), default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=HEADS)
    parser.add_argument("--head", choices=HEADS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only is None:
        options.only = [head for head in HEADS if (head, options.device) != ("liger", "meta")]
    return options


def surrogate(score: Callable[[Any], Scored]) -> Head:
    def loss(ids_RL: Any) -> Any:
        """The clipped surrogate at ratio 1, as a mean over tokens."""
        logprobs_C, _ = score(ids_RL)
        tokens = len(logprobs_C) // len(ids_RL)
        advantages_C = advantages(ids_RL).repeat_interleave(tokens)
        ratios_C = (logprobs_C - logprobs_C.detach()).exp()
        return -(ratios_C * advantages_C).mean()

    return loss


def advantages(ids_RL: Any) -> Any:
    import torch

    return torch.linspace(-1, 1, len(ids_RL), device=ids_RL.device)


def ours(model: Any, options: argparse.Namespace) -> Head:
    import torch

    from grpo_replay.engine.policy_module import PolicyModule

    module = PolicyModule(model, 1.0, options.chunk)

    def score(ids_RL: Any) -> Scored:
        rows, length = ids_RL.shape
        positions = torch.arange(rows * length, device=ids_RL.device).view(rows, length)
        return module(
            ids_RL, positions[:, PROMPT_TOKENS - 1 : -1].flatten(),
            ids_RL[:, PROMPT_TOKENS:].flatten(),
        )  # fmt: skip

    return surrogate(score)


def trl(model: Any, options: argparse.Namespace) -> Head:
    import torch
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(model, outputs=("log_probs", "entropy"))

    def score(ids_RL: Any) -> Scored:
        labels = ids_RL.clone()
        labels[:, :PROMPT_TOKENS] = -100
        found = model(
            input_ids=ids_RL, attention_mask=torch.ones_like(ids_RL), labels=labels,
            fused_lm_head=True,
        )  # fmt: skip
        completion = slice(PROMPT_TOKENS - ids_RL.shape[1], None)
        return found.log_probs[:, completion].flatten(), found.entropy[:, completion].flatten()

    return surrogate(score)


def logits(model: Any, options: argparse.Namespace) -> Head:
    import torch

    def score(ids_RL: Any) -> Scored:
        kept = ids_RL.shape[1] - PROMPT_TOKENS + 1
        scores = model(input_ids=ids_RL, logits_to_keep=kept, use_cache=False).logits[:, :-1]
        logp = torch.log_softmax(scores.float(), dim=-1)
        with torch.no_grad():
            entropies = -(logp.exp() * logp).sum(-1)
        chosen = logp.gather(-1, ids_RL[:, PROMPT_TOKENS:, None])
        return chosen.flatten(), entropies.flatten()

    return surrogate(score)


def liger(model: Any, options: argparse.Namespace) -> Head:
    import torch
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    fused = LigerFusedLinearGRPOLoss(
        beta=0.0, use_ref_model=False, loss_type="bnpo", compiled=options.device == "cuda"
    )

    def loss(ids_RL: Any) -> Any:
        hidden_RLH = model.get_submodule("model")(input_ids=ids_RL, use_cache=False)[0]
        targets_RT = ids_RL[:, PROMPT_TOKENS:]
        found, _ = fused(
            hidden_RLH[:, PROMPT_TOKENS - 1 : -1], model.lm_head.weight, targets_RT,
            torch.ones_like(targets_RT), advantages(ids_RL),
        )  # fmt: skip
        return found

    return loss


HEADS: dict[str, Callable[[Any, argparse.Namespace], Head]] = {
    "ours": ours,
    "trl": trl,
    "liger": liger,
    "logits": logits,
}


def measure(options: argparse.Namespace) -> dict[str, float]:
    import torch
    from safetensors.torch import save_file

    from grpo_replay.engine.models import load_policy
    from grpo_replay.recipe import ModelSection

    torch.set_num_threads(options.threads)
    if options.device == "meta":
        return {"wall": 0.0, "cpu": 0.0, "peak_mib": traced_mib(options)}
    section = ModelSection(
        path="builtin:qwen3-0.6b", tokenizer="builtin:bytes", dtype=options.dtype,
        random_init={"num_hidden_layers": options.layers},
    )  # fmt: skip
    model = load_policy(section, seed=0).train().to(options.device)
    head = HEADS[options.head](model, options)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(
        0, model.config.vocab_size, (options.rows, PROMPT_TOKENS + options.tokens),
        generator=generator,
    ).to(options.device)  # fmt: skip
    head(ids[:1, : PROMPT_TOKENS + 8]).backward()
    model.zero_grad()
    before = reset_peak(options.device)
    wall, cpu = time.perf_counter(), time.process_time()
    head(ids).backward()
    if options.device == "cuda":
        torch.cuda.synchronize()
    taken = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
    taken["peak_mib"] = peak(options.device) - before
    gradient = model.get_input_embeddings().weight.grad.float().cpu()
    save_file({"gradient": gradient}, options.folder / f"{options.head}.safetensors")
    return taken


def traced_mib(options: argparse.Namespace) -> float:
    """Peak of live bytes over those of the model, with attention as a flash kernel saves it."""
    import torch

    from grpo_replay.engine.models import DTYPES, load_config
    from grpo_replay.lab.dry_run.trace import _FUSED, LiveBytes, _meta_model, _with_layers
    from grpo_replay.recipe import ModelSection

    config = load_config(ModelSection(path="builtin:qwen3-0.6b", random_init=True))
    model = _meta_model(_with_layers(config, options.layers), DTYPES[options.dtype], _FUSED).train()
    head = HEADS[options.head](model, options)
    with LiveBytes(model) as live:
        shape = (options.rows, PROMPT_TOKENS + options.tokens)
        head(torch.zeros(shape, dtype=torch.int64, device="meta")).backward()
    return live.peak / 2**20


def reset_peak(device: str) -> float:
    """MiB in use now."""
    if device == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() / 2**20
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def peak(device: str) -> float:
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated() / 2**20
    return resident("VmHWM")


def resident(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def distance(folder: Path, name: str) -> float:
    from safetensors.torch import load_file

    if not (folder / "logits.safetensors").exists():
        return float("nan")
    one, other = (
        load_file(folder / f"{each}.safetensors")["gradient"] for each in (name, "logits")
    )
    return float((one - other).norm() / other.norm())


def main() -> None:
    options = parse_options()
    if options.head:
        print(json.dumps(measure(options)))
        return
    print(f"{'':<8}{'wall s':>10}{'CPU s':>10}{'peak MiB':>10}")
    with tempfile.TemporaryDirectory() as name:
        found = {}
        for head in options.only:
            words = [sys.executable, __file__, *sys.argv[1:], "--head", head, "--folder", name]
            environment = os.environ | ENVIRONMENT | {"OMP_NUM_THREADS": str(options.threads)}
            done = subprocess.run(words, env=environment, capture_output=True, text=True)
            if done.returncode != 0:
                raise SystemExit(f"{head} failed:\n{done.stderr[-3000:]}")
            found[head] = json.loads(done.stdout.splitlines()[-1])
            print(f"{head:<8}{found[head]['wall']:>10.2f}{found[head]['cpu']:>10.2f}"
                  f"{found[head]['peak_mib']:>10.0f}", flush=True)  # fmt: skip
        for head in options.only if options.device != "meta" else ():
            print(f"{head:<8} gradient {distance(Path(name), head):.1e} from that of all logits")


if __name__ == "__main__":
    main()
