"""The policy and its optimizer: protocol, DeepSpeed, policy module, models, weight names.

Imports buffer, grpo and what is below; torch, transformers and deepspeed.
"""
