"""The policy and its optimizer: protocol, DeepSpeed, policy module, models, weight names.

May import buffer, grpo and the floors below; torch, transformers and deepspeed.
"""
