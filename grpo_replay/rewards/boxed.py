"""The `boxed` verifier: the last box of a completion against the reference answer, as a strict but
fair examiner grades it (docs/rewards.md). Equal text, after normalisation, is enough. Otherwise
rules take both apart: each returns True, False, or None if it does not apply. Formulas are read by
math-verify's LaTeX parser and compared to 200 digits, never rounded.
"""

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, NormalizationConfig, latex2sympy
from math_verify.errors import TimeoutException
from math_verify.utils import timeout

from grpo_replay.rewards import answer_text
from grpo_replay.rewards.answer_text import members, normalised, quantity, split
from grpo_replay.rewards.math_verify import REMEMBERED, SymbolicGrader, is_too_expensive

LIMIT_SECONDS = 5
DIGITS = 200
"""To which formulas are compared: e^100 and e^100 + 1 differ in the 44th."""
LONGEST_ANSWER = 2_000
"""Characters of an answer that is more than compared as text."""
LEAST_DIGITS = 6
"""Significant digits from which on a decimal may stand for the number that it is rounded from."""

_RELATIONS, _MIRROR = "=≠<>≤≥∈≈", str.maketrans("<>≤≥", "><≥≤")
_NAME = re.compile(
    r'(?!\\(?:frac|sqrt|pi|infty)(?![a-z]))(?:[a-zA-Z"]|\\[a-zA-Z])[^+\-*/^|!]*|\([a-z](?:,[a-z])+\)'
)
_DECIMAL = re.compile(r"(-?)(\d+)(?:\.(\d*))?")
_IN_BASE = re.compile(r"(-?)0*([\dA-Z]*\d[\dA-Z.]*)_\{?(\d+)\}?")
_CHOICE = re.compile(r"\(?([A-J])(?:[).:](.*))?")
_DATE = re.compile(r"\d{4}-\d\d-\d\d|\d\d/\d\d/\d{4}")
_CAPITALISED = re.compile("[A-Z][a-z]+")
_SHORT_WORD = re.compile("yes|no|on|off|up|odd|one|two|six|ten|red", re.IGNORECASE)
"""What no task means as a product of variables."""
_LETTER_D = re.compile(r"(\\[a-zA-Z]+)|d")
"""A letter that the parser takes for a differential where another follows."""
_SCALES = {"%": sympy.Rational(1, 100), "°": sympy.pi / 180}


class BoxedGrader(SymbolicGrader):
    """Grades with `same`. A completion without a box is unparsable."""

    def _grade(self, completion: str, answer: str) -> tuple[str, bool]:
        self._swallowed.clear()
        boxed = answer_text.last_boxes(completion)
        if not boxed:
            return "unparsable", bool(answer)
        correct = boxed[0].strip() == answer.strip()
        if not correct and max(map(len, (answer, *boxed))) <= LONGEST_ANSWER:
            try:
                correct = timeout(LIMIT_SECONDS)(_is_right)(answer, boxed)
            except TimeoutException:
                self._swallowed.timed_out = True
            except RecursionError:
                correct = False
        return self._status(correct, True), bool(answer)


def _is_right(answer: str, boxed: Sequence[str]) -> bool:
    """Whether the last box is `answer`, or all that are joined to it are, if that is a list."""
    gold, last, *joined = (normalised(each) for each in (answer, *boxed))
    if not last or any(map(is_too_expensive, (gold, last, *joined))):
        return gold == last
    return same(gold, last) or (len(members(gold)) > 1 and any(same(gold, each) for each in joined))


def same(gold: str, answer: str) -> bool:
    """Whether two normalised answers are equal."""
    if gold.replace('"', "") == answer.replace('"', ""):
        return True
    # The commas of 70,110 may be those of a list or of thousands.
    ours, theirs = ({each, answer_text.without_thousands(each)} for each in (gold, answer))
    pairs = [(one, other) for one in ours for other in theirs]
    rules = (_dates, _regions, _lists, _relations, _brackets, _texts, _quantities)
    verdicts = ((rule(*pair) for rule in rules) for pair in pairs)
    return any(next((each for each in found if each is not None), False) for found in verdicts)


def _dates(gold: str, answer: str) -> bool | None:
    """Equal dates are equal texts: 2024-03-05 is no difference."""
    return False if any(map(_DATE.fullmatch, (gold, answer))) else None


def _regions(gold: str, answer: str) -> bool | None:
    """Parts of the line, however they are written."""
    if not re.search("[<>≤≥≠∈∪∖ℝ]", gold + answer):
        return None
    ours, theirs = _region(gold), _region(answer)
    if not ours or not theirs or len(ours[0] | theirs[0]) > 1:
        return None
    return ours[1].symmetric_difference(theirs[1]) == sympy.S.EmptySet or None


def _lists(gold: str, answer: str) -> bool | None:
    ours, theirs = members(gold), members(answer)
    if len(ours) == len(theirs) == 1:
        return None
    for one in ours:
        match = next((each for each in theirs if same(one, each)), None)
        if match is None:
            return False
        theirs.remove(match)
    return not theirs


def _relations(gold: str, answer: str) -> bool | None:
    ours, theirs = split(gold, _RELATIONS), split(answer, _RELATIONS)
    if len(ours) == len(theirs) == 1:
        return None
    one, other = _solution(ours), _solution(theirs)
    if 1 in (len(ours), len(theirs)) or (one and other and ours[0] == theirs[0]):
        return bool(one and other) and same(one or "", other or "")
    for chain in (theirs, [each.translate(_MIRROR) for each in theirs[::-1]]):
        if ours[1::2] == chain[1::2] and all(map(same, ours[::2], chain[::2])):
            return True
    if len(ours) + len(theirs) != 6 or ours[1] + theirs[1] != "==" or (one and _is_number(one)):
        return False  # another equation of a number that is found does not say the number
    one_side = [read(f"{left}-({right})") for left, _, right in (ours, theirs)]
    return equal(one_side[0], one_side[1], scaled=True)


def _solution(chain: Sequence[str]) -> str | None:
    """What a chain of equations says: the value of a name, or of numbers that are equal."""
    if "≈" in chain[1::2]:
        exact = chain[: chain.index("≈")]
        chain = (
            exact if len(exact) > 1 or not _NAME.fullmatch(exact[0]) else [*exact, "=", chain[-1]]
        )
    if len(chain) == 1 or not set(chain[1::2]) <= set("=∈"):
        return chain[0] if len(chain) == 1 else None
    if len(chain) == 3 and _NAME.fullmatch(chain[2]) and not _NAME.fullmatch(chain[0]):
        return chain[0]
    named = bool(_NAME.fullmatch(chain[0]))
    known = [_is_number(each) and same(each, chain[-1]) for each in chain[2 * named :: 2]]
    return chain[-1] if all(known) or (named and not any(map(_is_number, chain[2:-1:2]))) else None


def _brackets(gold: str, answer: str) -> bool | None:
    """Sets, tuples, intervals and matrices, by the kind of their brackets."""
    ours, theirs = _bracketed(gold), _bracketed(answer)
    for mine, other in ((ours, answer), (theirs, gold)):
        if mine and mine[0] in ("()", "{}") and len(mine[1]) == 1:
            return same(mine[1][0], other)
    if not ours or not theirs:
        return False if (ours or theirs) and "matrix" not in gold + answer else None
    if ours[0] == theirs[0] == "⦃⦄":
        sets = [members(",".join(items)) for _, items in (ours, theirs)]
        return all(any(same(x, y) for y in b) for a, b in (sets, sets[::-1]) for x in a)
    return [ours[0], len(ours[1])] == [theirs[0], len(theirs[1])] and all(
        map(same, ours[1], theirs[1])
    )


def _bracketed(text: str) -> tuple[str, list[str]] | None:
    """The kind of the brackets around all of `text`, and their items. A column is a tuple."""
    if found := re.fullmatch(r"\\begin\{(\w+)\}(.*)\\end\{\1\}", text):
        rows = [row.split("&") for row in found[2].rstrip("\\").split(r"\\")]
        is_column = found[1] == "pmatrix" and len(rows) > 1 == len(rows[0])
        return "()" if is_column else f"{found[1]}{len(rows)}", [x for row in rows for x in row]
    depths = accumulate((sign in "([{⦃") - (sign in ")]}⦄") for sign in text[:-1])
    if len(text) < 3 or text[-1] not in ")]}⦄" or min(depths) < 1:
        return None
    return text[0] + text[-1], split(text[1:-1], ",")[::2]


def _texts(gold: str, answer: str) -> bool | None:
    """Words, and the letters of choices, with or without what they stand for."""
    choices = [_CHOICE.fullmatch(each.replace('"', "")) for each in (gold, answer)]
    if choices[0] and choices[1]:
        return choices[0][1] == choices[1][1]
    for choice, other in zip(choices, (answer, gold)):
        if choice and choice[2]:
            return same(choice[2], other)
    pair = (gold, answer)
    is_name = any(map(_CAPITALISED.fullmatch, pair)) and gold.casefold() == answer.casefold()
    if not is_name and not any('"' in quantity(each)[0] or _is_word(each) for each in pair):
        return None
    one, other = (re.sub(r"[^\w+-]", "", each.casefold()).rstrip("s") for each in pair)
    return one == other


def _is_word(text: str) -> bool:
    """Whether letters are no product of variables: four or more, or a short word."""
    return bool(re.fullmatch("[A-Za-z]{4,}", text) or _SHORT_WORD.fullmatch(text))


def _quantities(gold: str, answer: str) -> bool:
    """Numbers in a base, and values with a unit, which may be left out."""
    if bases := [found for each in (gold, answer) if (found := _IN_BASE.fullmatch(each))]:
        return len(bases) == 2 and bases[0].groups() == bases[1].groups()
    (ours, unit), (theirs, other) = quantity(gold), quantity(answer)
    one, two = read(ours), read(theirs)
    if not isinstance(one, _VALUES) or not isinstance(two, _VALUES):
        return False
    if unit and other:
        return unit[0] == other[0] and equal(one * unit[1], two * other[1])
    if equal(one, two) or _rounds(ours, two, theirs) or _rounds(theirs, one, ours):
        return True
    scale = _SCALES.get((unit or other or ("", 1))[0])
    return bool(scale) and (equal(one * scale, two) if unit else equal(one, two * scale))


_VALUES = (sympy.Expr, sympy.MatrixBase)


def _rounds(decimal: str, exact: Any, text: str) -> bool:
    """Whether a decimal of many digits is `exact`, whose `text` is no decimal, rounded or cut."""
    found = _DECIMAL.fullmatch(decimal)
    if not found or not found[3] or _DECIMAL.fullmatch(text):
        return False
    digits = (found[2] + found[3]).lstrip("0")
    if (
        len(digits) < LEAST_DIGITS
        or not getattr(exact, "is_real", False)
        or bool(exact < 0) != bool(found[1])
    ):
        return False
    beyond = abs(exact) * 10 ** len(found[3]) - int(digits)
    return bool(-sympy.Rational(1, 2) <= beyond) and bool(beyond < 1)


def _remembered(function: Callable[[str], Any]) -> Callable[[str], Any]:
    """`function` with a cache. None where the parser or sympy raise, which may be anything."""

    @lru_cache(maxsize=REMEMBERED)
    def tried(text: str) -> Any:
        try:
            return function(text)
        except MemoryError:
            raise
        except Exception:
            return None

    return tried


@_remembered
def read(text: str) -> Any:
    """What sympy makes of a formula, a set or a relation, with exact decimals."""
    number = re.sub(r"^([+-]?)\\frac\{(\d+)\}\{(\d+)\}$", r"\1\2/\3", text)
    if re.fullmatch(r"[+-]?\d+(?:\.\d*|/\d+)?", number):
        return sympy.Rational(number)
    letters = text if r"\int" in text else _LETTER_D.sub(lambda d: d[1] or r"\delta ", text)
    found = latex2sympy(
        letters.translate(answer_text.LATEX),
        normalization_config=NormalizationConfig(basic_latex=True, malformed_operators=True),
        conversion_config=ConversionConfig(lowercase_symbols=False),
        convert_degrees=True,
    )
    if isinstance(found, sympy.MatrixBase):
        return found
    exact = {each: sympy.Rational(str(each)) for each in found.atoms(sympy.Float)}
    unknown = found.atoms(sympy.core.function.AppliedUndef)
    names = {each: sympy.Symbol(str(each)) for each in unknown} | {sympy.Symbol("i"): sympy.I}
    return found.xreplace(exact | names).doit()


def _is_number(text: str) -> bool:
    return isinstance(found := read(text), sympy.Expr) and not found.free_symbols


@_remembered
def _region(text: str) -> Any:
    """The variable, if any, in a set, and the part of the line; None if the text is none."""
    names: set[sympy.Symbol] = set()
    parts = []
    for part in split(re.sub(r"^⦃\w+(?:∈ℝ)?[|:](.*)⦄$", r"\1", text), ";")[::2]:
        name = re.match(r"([a-zA-Z])∈", part)
        found = read(part[2:] if name else part)
        if name:
            names = names | {sympy.Symbol(name[1])}
        if not isinstance(found, sympy.Set):
            names, found = names | found.free_symbols, found.as_set()
        parts.append(found)
    region = sympy.Union(*parts)
    return None if region is sympy.S.EmptySet else (names, region)


def equal(one: Any, other: Any, scaled: bool = False) -> bool:
    """Whether two formulas have the same value wherever both are real; `scaled`: but for a
    factor."""
    if isinstance(one, sympy.MatrixBase) or isinstance(other, sympy.MatrixBase):
        shapes = [getattr(each, "shape", None) for each in (one, other)]
        return shapes[0] == shapes[1] and all(map(equal, one.flat(), other.flat()))
    if not isinstance(one, sympy.Expr) or not isinstance(other, sympy.Expr):
        return False
    if one == other or (one.is_Rational and other.is_Rational):
        return bool(one == other)
    names = sorted(one.free_symbols | other.free_symbols, key=str)
    pairs = []
    for n in range(6 if names else 1):  # at rational points of both signs
        at = {
            name: (-1) ** (n * place + n) * sympy.Rational(7 * n + 11 * place + 3, 5 + place)
            for place, name in enumerate(names)
        }
        pair = [each.subs(at).evalf(DIGITS) for each in (one, other)]
        if all(each.is_number and each.is_finite for each in pair):
            pairs.append(pair)
    pairs = [pair for pair in pairs if all(each.is_real for each in pair)] or pairs
    if scaled and pairs:
        first, second = pairs[0]
        pairs = [[a * second, b * first] for a, b in pairs] if first and second else []
    tiny = sympy.Float(f"1e-{DIGITS - 20}")
    return bool(pairs) and all(abs(a - b) <= tiny * max(abs(a), abs(b)) for a, b in pairs)
