"""The parts of benchmarks/gpu.py: what is measured on a machine with a GPU, in what order.

`catalogue` lists the parts, `runner` runs each in a process of its own, `record` is where a part
writes what it finds, `report` makes Markdown of it. torch and everything heavier is imported
inside functions, so that the runner survives whatever a part dies of.
"""
