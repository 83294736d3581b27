"""Reward functions for `reward.function: core_rewards:…`."""


def always_wrong(completion: str, answer: str, row: dict) -> float:
    return -1.0


def graded(completion: str, answer: str, row: dict) -> float:
    """More than two values: nearer answers earn more."""
    digits = "".join(c for c in completion if c.isdigit() or c == "-")
    try:
        return -min(abs(int(digits) - int(answer)), 100) / 100
    except ValueError:
        return -1.0
