"""Reward functions for `reward.function: core_rewards:…`."""


def graded(completion: str, answer: str, row: dict) -> float:
    """More than two values: nearer answers earn more."""
    boxed = completion.partition("boxed{")[2].partition("}")[0]
    try:
        return -min(abs(int(boxed) - int(answer)), 100) / 100
    except ValueError:
        return -1.0
