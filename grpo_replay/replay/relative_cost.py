"""The compute of a training step with a buffer, relative to one without (paper B)."""


def relative_compute(y: float, mu: float) -> float:
    """γ = (1 + W/T)/(1 + μ): compute of one step relative to no buffer at equal batch size.

    With inference workers and trainers in balance, W/T = μ/y. The deterministic form
    (B + μR)/(B + μB) is equal. If groups are dropped, pass y and μ of survivors (B/B' and μR/B'),
    as `lab.planning.design` does: γ without a buffer is then 1.
    """
    return (1 + mu / y) / (1 + mu)
