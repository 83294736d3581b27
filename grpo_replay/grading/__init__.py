"""What verifier workers run: the graders, the wire between trainer and worker, and the pool.

Nothing here imports torch; math-verify is imported by the workers alone.
"""
