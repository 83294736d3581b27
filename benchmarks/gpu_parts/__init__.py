"""What benchmarks/gpu.py runs, in processes of its own."""
