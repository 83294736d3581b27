"""The `minerva` verifier: compares the last box near the end of a completion as normalised text.
Also finds that box (paper A, appendix), for `math_verify_boxed` too.

The normalisation follows Minerva (Lewkowycz et al. 2022, appendix D.1): it cleans up LaTeX, removes
unit words, expands shorthand for fractions and roots, and strips commas between digits. It compares
text, so `1/2` and `\\frac{1}{2}` differ. Paper A trains with it.
"""

import re

TAIL_CHARACTERS = 500
"""Only a box that lies entirely within this many trailing characters counts."""

_REWRITES = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)

_UNIT_WORDS = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "ft", "hours", "km", "units"),
    *("\\ldots", "sue", "points", "feet", "minutes", "digits", "cents", "degrees", "cm", "gm"),
    *("pounds", "meters", "meals", "edges", "students", "childrentickets", "multiples"),
)

_LATEX_NOISE = (
    "\\text{s}",
    "\\text{.}",
    "\\text{\ns}",
    "\\text{}^2",
    "\\text{}^3",
    "\\text{\n}",
    "\\text{}",
    "\\mathrm{th}",
    "^\\circ",
    "^{\\circ}",
    "\\;",
    ",\\!",
    "{,}",
    '"',
    "\\dots",
)

_PATTERNS = (
    (re.compile(r".*?\$(.*?)\$.*"), r"$\1$"),  # the answer is the content of $…$
    (re.compile(r"\\text\{(.*?)\}"), r"\1"),
    (re.compile(r"\\textbf\{(.*?)\}"), r"\1"),
    (re.compile(r"\\overline\{(.*?)\}"), r"\1"),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),  # \frac12 -> \frac{1}{2}
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),  # \sqrt3 -> \sqrt{3}
)


def normalise(answer: str) -> str:
    """Normalise the text after the last `=` of `answer` as Minerva does: without units, LaTeX
    markup and the commas of a whole number."""
    answer = answer.split("=")[-1]
    for before, after in _REWRITES:
        answer = answer.replace(before, after)
    for noise in (*_UNIT_WORDS, *_LATEX_NOISE):
        answer = answer.replace(noise, "")
    for pattern, replacement in _PATTERNS:
        answer = pattern.sub(replacement, answer)
    answer = answer.replace("$", "")
    without_commas = answer.replace(",", "")
    return (without_commas if without_commas.isdigit() else answer).strip()


def grade(completion: str, answer: str) -> str:
    """Return "correct", "incorrect", or "unparsable" if the completion's tail has no box."""
    boxed = boxed_answer(completion)
    if boxed is None:
        return "unparsable"
    return "correct" if normalise(boxed) == normalise(answer) else "incorrect"


def boxed_answer(completion: str) -> str | None:
    """Returns the content of the last box in the trailing `TAIL_CHARACTERS`.

    None if they contain no complete box, or if the last one is never closed.
    """
    return last_box(completion[-TAIL_CHARACTERS:])


def last_box(text: str) -> str | None:
    """Return the content of the last `\\boxed{…}` in `text`, with balanced braces.

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
