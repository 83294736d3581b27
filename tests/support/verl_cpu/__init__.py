"""verl on a machine without an accelerator: how the tests run it, and how to try it on a laptop.

    pip install torch==2.13.0 verl==0.9.1 TransferQueue pyzmq msgspec fastapi uvicorn cachetools
    pip install -e .
    PYTHONPATH=tests/support python -m verl_cpu OUTPUT_DIR [hydra words]

Real, of verl 0.9.1, with no file changed: hydra configuration, Ray, TransferQueue, agent and reward
loops, tool loop, advantages, FSDP2 actor and reference model, loss, optimizer, checkpoints.
Real, of transformers: the tiny model, its tokenizer.

Not real (`stand_ins`, `sampler`): the hardware is a platform "cpu" whose GPUs are numbers in Ray;
process groups are gloo's; completions are sampled by a Ray actor with transformers, one at a time,
instead of vLLM or SGLang; weights reach it as arguments of a call, or in `separate_async` by file.

`seeded` gives verl's prompts ids from a seed and its rows an order that does not depend on arrival,
so that two runs are equal bit for bit. `command` makes the command line; `task` has the data, the
reward and the tool.
"""
