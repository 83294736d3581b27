"""Reward functions of a user in a file of their own, named as `judge_rewards_file.py:…`."""

import sys


def boxed_is_right(completion: str, answer: str, row: dict) -> float:
    return 1.0 if f"{{{answer}}}" in completion else 0.0


def shortness(completions, answers):
    return [-len(each) / 100 if len(completions) > 1 else -99.0 for each in completions]


def raises(completion: str, answer: str, row: dict) -> float:
    return row["no such field"]


def returns_nan(completion: str, answer: str, row: dict) -> float:
    return float("nan")


def returns_none(completion: str, answer: str, row: dict) -> None:
    return None


def returns_text(completion: str, answer: str, row: dict) -> str:
    return "1"


def exits(completion: str, answer: str, row: dict) -> float:
    sys.exit(0)


def other_names(text: str, gold: str, meta: dict) -> float:
    return 1.0
