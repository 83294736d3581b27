"""Priorities as a user writes them, good and bad ones."""

import numpy as np


def short(columns):
    return 1 / columns["completion_tokens"]


short.columns = ("completion_tokens",)


def unnamed(columns):
    return columns["reward"]


def misnamed(columns):
    return columns["length"]


misnamed.columns = ("length",)


def negative(columns):
    return -columns["completion_tokens"]


negative.columns = ("completion_tokens",)


def relative(columns):
    return columns["completion_tokens"] / columns["completion_tokens"].sum()


relative.columns = ("completion_tokens",)


def position(columns):
    return np.arange(len(columns["completion_tokens"]))


def nothing(columns):
    return None


def scalar(columns):
    return columns["completion_tokens"].mean()


def lazy(columns):
    return (length for length in columns["completion_tokens"])


def names(columns):
    return ["short" for _ in columns["completion_tokens"]]


def first_is_nan(columns):
    return np.where(columns["rollout_id"] == 1, np.nan, 1.0)


for _each in (position, nothing, scalar, lazy, names):
    _each.columns = ("completion_tokens",)
first_is_nan.columns = ("rollout_id",)

NUMBER = 3
