"""The answer in a completion: the last `\\boxed{…}` near its end (paper A, appendix).

Both of paper A's verifiers grade it: `minerva` in training, `math_verify_boxed` in evaluation.
"""

TAIL_CHARACTERS = 500
"""Only a box that lies entirely within this many trailing characters counts."""


def boxed_answer(completion: str) -> str | None:
    """The content of the last box in the trailing `TAIL_CHARACTERS`.

    None if they contain no complete box, or if the last one is never closed.
    """
    return last_box(completion[-TAIL_CHARACTERS:])


def last_box(text: str) -> str | None:
    """The content of the last `\\boxed{…}` in `text`, with balanced braces.

    None if there is no box or if the last one is never closed.
    """
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    begin = start + len("\\boxed{")
    depth = 1
    for position in range(begin, len(text)):
        character = text[position]
        if character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return text[begin:position]
    return None
