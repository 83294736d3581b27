"""The only modules that import torch-heavy libraries: deepspeed, transformers, vllm."""
