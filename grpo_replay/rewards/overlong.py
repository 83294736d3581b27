"""DAPO's soft overlong punishment (Yu et al. 2025, equation 13)."""


def overlong_score(length_tokens: int, longest_tokens: int, buffer_tokens: int) -> float:
    """The score of a completion for its length, in [-1, 0].

    0 up to `longest_tokens - buffer_tokens`, then falling linearly to -1 at `longest_tokens`.
    Example: of at most 20 tokens with a buffer of 8, lengths 12, 14 and 20 score 0, -0.25 and -1.
    """
    free_tokens = longest_tokens - buffer_tokens
    return max(-1.0, min(0.0, (free_tokens - length_tokens) / buffer_tokens))
