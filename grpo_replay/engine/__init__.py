"""The policy and its optimizer: protocol, DeepSpeed, policy module, models, weight names.

May import replay and the floors below; torch, transformers and deepspeed.
"""
