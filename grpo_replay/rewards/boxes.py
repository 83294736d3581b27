"""The answer of a completion: the last `\\boxed{…}` near its end (paper A, appendix).

What both of paper A's verifiers grade, `minerva` in training and `math_verify_boxed` in evaluation.
"""

TAIL_CHARACTERS = 500
"""Only a box that lies wholly within the last so many characters counts."""


def boxed_answer(completion: str) -> str | None:
    """The content of the last box in the trailing `TAIL_CHARACTERS`; None if there is no whole box
    there, or if the last one is never closed."""
    return last_box(completion[-TAIL_CHARACTERS:])


def last_box(text: str) -> str | None:
    """The content of the last `\\boxed{…}` of `text`, braces balanced.

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
