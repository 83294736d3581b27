"""Priorities as a user writes them, good and bad ones."""


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


def nothing(columns):
    return None


nothing.columns = ("completion_tokens",)

NUMBER = 3
