"""The `boxed` verifier: compares the last box of a completion with the reference answer (gold) as
a strict but fair examiner does (docs/rewards.md).

Equal text, after normalisation, is enough. Otherwise rules are tried in order; each returns True,
False, or None if it does not apply, and the first that applies decides. Formulas are parsed by
math-verify's LaTeX parser and compared to 200 digits, never rounded.
"""

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, product
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
"""Precision to which formulas are compared: e^100 and e^100 + 1 differ in the 44th digit."""
LONGEST_ANSWER = 2_000
"""Longest answer, in characters, that the rules apply to; longer ones are compared as text."""
LEAST_DIGITS = 6
"""Fewest significant digits of a decimal that may stand for an exact number by rounding."""

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
"""Short words that no task means as a product of variables."""
_LETTER_D = re.compile(r"(\\[a-zA-Z]+)|d")
"""The letter d, which the parser would read as a differential before another letter."""
_SCALES = {"%": sympy.Rational(1, 100), "°": sympy.pi / 180}


class BoxedGrader(SymbolicGrader):
    """Grades with `same`. A completion without a box is unparsable."""

    def _grade(self, completion: str, answer: str) -> tuple[str, bool]:
        """Compares the boxes as text, then, unless they are too long, by the rules in a time limit.
        Returns the status and whether the reference answer is not empty."""
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
    """Whether the last box is right; for a list as gold answer, also the boxes joined to a list."""
    gold, last, *joined = (normalised(text) for text in (answer, *boxed))
    if not last or any(map(is_too_expensive, (gold, last, *joined))):
        return gold == last
    gold_is_list = len(members(gold)) > 1
    return same(gold, last) or (gold_is_list and any(same(gold, boxes) for boxes in joined))


def same(gold: str, answer: str) -> bool:
    """Returns whether two normalised answers are equal."""
    if gold.replace('"', "") == answer.replace('"', ""):
        return True
    # The commas of 70,110 may be those of a list or of thousands.
    golds, answers = ({text, answer_text.without_thousands(text)} for text in (gold, answer))
    return any(_apply_rules(*pair) for pair in product(golds, answers))


def _apply_rules(gold: str, answer: str) -> bool:
    """Returns the verdict of the first rule that applies; False if none does."""
    rules = (_dates, _regions, _lists, _relations, _brackets, _texts, _quantities)
    verdicts = (rule(gold, answer) for rule in rules)
    return next((verdict for verdict in verdicts if verdict is not None), False)


def _dates(gold: str, answer: str) -> bool | None:
    """Compare dates as text, so that 2024-03-05 is not read as a difference."""
    return False if any(map(_DATE.fullmatch, (gold, answer))) else None


def _regions(gold: str, answer: str) -> bool | None:
    """Compare regions of the real line: intervals, unions and inequalities in at most one variable.
    Never False: regions that differ as sets are left to later rules."""
    if not re.search("[<>≤≥≠∈∪∖ℝ]", gold + answer):
        return None
    gold_region, region = _region(gold), _region(answer)
    if not gold_region or not region or len(gold_region[0] | region[0]) > 1:
        return None
    return gold_region[1].symmetric_difference(region[1]) == sympy.S.EmptySet or None


def _lists(gold: str, answer: str) -> bool | None:
    """Compare lists without regard to order; None if both are single values, for later rules."""
    expected, remaining = members(gold), members(answer)
    if len(expected) == len(remaining) == 1:
        return None
    for value in expected:
        match = next((candidate for candidate in remaining if same(value, candidate)), None)
        if match is None:
            return False
        remaining.remove(match)
    return not remaining


def _relations(gold: str, answer: str) -> bool | None:
    """Compare chains of equations and inequalities, also reversed (a < b, b > a), two equations
    also up to a factor. If one side is a plain value, or both chains have the same left side and
    give a value, only the values are compared. None for two plain values."""
    gold_chain, chain = split(gold, _RELATIONS), split(answer, _RELATIONS)
    if len(gold_chain) == len(chain) == 1:
        return None
    gold_value, value = _solution(gold_chain), _solution(chain)
    has_plain_value = 1 in (len(gold_chain), len(chain))
    if has_plain_value or (gold_value and value and gold_chain[0] == chain[0]):
        return bool(gold_value and value) and same(gold_value or "", value or "")
    for candidate in (chain, [part.translate(_MIRROR) for part in chain[::-1]]):
        same_relations = gold_chain[1::2] == candidate[1::2]
        if same_relations and all(map(same, gold_chain[::2], candidate[::2])):
            return True
    are_equations = len(gold_chain) == len(chain) == 3 and gold_chain[1] == chain[1] == "="
    if not are_equations or (gold_value and _is_number(gold_value)):
        return False  # an equation that the wanted number satisfies does not give the number
    differences = [read(f"{left}-({right})") for left, _, right in (gold_chain, chain)]
    return equal(differences[0], differences[1], scaled=True)


def _solution(chain: Sequence[str]) -> str | None:
    """Returns the value that a chain of equations gives: 5 of `x=5`, `x=2+3=5`, `5=x` and `2+3=5`,
    the exact side of `≈` unless that is only a name; None for inequalities and contradictions."""
    if "≈" in chain[1::2]:
        exact = chain[: chain.index("≈")]
        is_name_alone = len(exact) == 1 and _NAME.fullmatch(exact[0])
        chain = [*exact, "=", chain[-1]] if is_name_alone else exact
    if len(chain) == 1:
        return chain[0]
    if not set(chain[1::2]) <= set("=∈"):
        return None
    begins_with_name = bool(_NAME.fullmatch(chain[0]))
    if len(chain) == 3 and _NAME.fullmatch(chain[2]) and not begins_with_name:
        return chain[0]
    values = chain[2 if begins_with_name else 0 :: 2]
    if all(_is_number(value) and same(value, chain[-1]) for value in values):
        return chain[-1]
    has_number_between = any(map(_is_number, chain[2:-1:2]))
    return chain[-1] if begins_with_name and not has_number_between else None


def _brackets(gold: str, answer: str) -> bool | None:
    """Compare sets (in any order), tuples, intervals and matrices by their brackets and items.
    Brackets around a single item are ignored. None if neither has brackets, for later rules."""
    expected, given = _bracketed(gold), _bracketed(answer)
    for bracketed, other in ((expected, answer), (given, gold)):
        if bracketed and bracketed[0] in ("()", "{}") and len(bracketed[1]) == 1:
            return same(bracketed[1][0], other)
    if not expected or not given:
        return False if (expected or given) and "matrix" not in gold + answer else None
    if expected[0] == given[0] == "⦃⦄":
        sets = [members(",".join(items)) for _, items in (expected, given)]
        return all(any(same(x, y) for y in b) for a, b in (sets, sets[::-1]) for x in a)
    same_kind = expected[0] == given[0] and len(expected[1]) == len(given[1])
    return same_kind and all(map(same, expected[1], given[1]))


def _bracketed(text: str) -> tuple[str, list[str]] | None:
    """Returns the kind of the brackets around all of `text`, and their items; None without such. A
    matrix of one column is a tuple."""
    if matrix := re.fullmatch(r"\\begin\{(\w+)\}(.*)\\end\{\1\}", text):
        rows = [row.split("&") for row in matrix[2].rstrip("\\").split(r"\\")]
        is_column = matrix[1] == "pmatrix" and len(rows) > 1 == len(rows[0])
        return "()" if is_column else f"{matrix[1]}{len(rows)}", [x for row in rows for x in row]
    depths = accumulate((sign in "([{⦃") - (sign in ")]}⦄") for sign in text[:-1])
    if len(text) < 3 or text[-1] not in ")]}⦄" or min(depths) < 1:
        return None
    return text[0] + text[-1], split(text[1:-1], ",")[::2]


def _texts(gold: str, answer: str) -> bool | None:
    """Compare words (without case, plural s and punctuation), and the letters of choices, with or
    without the text of the choice: B, (B) and "B. blue" are equal, as are "B. blue" and "blue".
    None if neither is a word or a choice."""
    choices = [_CHOICE.fullmatch(text.replace('"', "")) for text in (gold, answer)]
    if choices[0] and choices[1]:
        return choices[0][1] == choices[1][1]
    for choice, other in zip(choices, (answer, gold)):
        if choice and choice[2]:
            return same(choice[2], other)
    pair = (gold, answer)
    is_name = any(map(_CAPITALISED.fullmatch, pair)) and gold.casefold() == answer.casefold()
    if not is_name and not any('"' in quantity(text)[0] or _is_word(text) for text in pair):
        return None
    expected, given = (re.sub(r"[^\w+-]", "", text.casefold()).rstrip("s") for text in pair)
    return expected == given


def _is_word(text: str) -> bool:
    """Returns whether letters are a word and not a product of variables."""
    return bool(re.fullmatch("[A-Za-z]{4,}", text) or _SHORT_WORD.fullmatch(text))


def _quantities(gold: str, answer: str) -> bool:
    """Compare two numbers: of equal base, or as values, also if one is the other rounded. The units
    of both are converted; one side's unit is ignored, but % and ° may also be applied."""
    if bases := [match for text in (gold, answer) if (match := _IN_BASE.fullmatch(text))]:
        return len(bases) == 2 and bases[0].groups() == bases[1].groups()
    (gold_text, gold_unit), (text, unit) = quantity(gold), quantity(answer)
    gold_value, value = read(gold_text), read(text)
    if not isinstance(gold_value, _VALUES) or not isinstance(value, _VALUES):
        return False
    if gold_unit and unit:
        return gold_unit[0] == unit[0] and equal(gold_value * gold_unit[1], value * unit[1])
    if equal(gold_value, value):
        return True
    if _rounds(gold_text, value, text) or _rounds(text, gold_value, gold_text):
        return True
    scale = _SCALES.get((gold_unit or unit or ("", 1))[0])
    if not scale:
        return False
    return equal(gold_value * scale, value) if gold_unit else equal(gold_value, value * scale)


_VALUES = (sympy.Expr, sympy.MatrixBase)


def _rounds(decimal: str, exact: Any, text: str) -> bool:
    """Returns whether a decimal of at least `LEAST_DIGITS` digits is the number `exact`, rounded or
    truncated. The `text` of that number must not be a decimal itself."""
    match = _DECIMAL.fullmatch(decimal)
    if not match or not match[3] or _DECIMAL.fullmatch(text):
        return False
    sign, whole, fraction = match.groups()
    digits = (whole + fraction).lstrip("0")
    if len(digits) < LEAST_DIGITS or not getattr(exact, "is_real", False):
        return False
    if bool(exact < 0) != bool(sign):
        return False
    error = abs(exact) * 10 ** len(fraction) - int(digits)  # in units of the last digit
    return bool(-sympy.Rational(1, 2) <= error) and bool(error < 1)


def _cached_or_none(function: Callable[[str], Any]) -> Callable[[str], Any]:
    """Decorator: caches results; None where the parser or sympy raises anything but MemoryError."""

    @lru_cache(maxsize=REMEMBERED)
    def guarded(text: str) -> Any:
        try:
            return function(text)
        except MemoryError:
            raise
        except Exception:
            return None

    return guarded


@_cached_or_none
def read(text: str) -> Any:
    """Parse a formula, a set or a relation with sympy; decimals stay exact, `i` is the imaginary
    unit. None if it cannot be parsed."""
    number = re.sub(r"^([+-]?)\\frac\{(\d+)\}\{(\d+)\}$", r"\1\2/\3", text)
    if re.fullmatch(r"[+-]?\d+(?:\.\d*|/\d+)?", number):
        return sympy.Rational(number)
    letters = text if r"\int" in text else _LETTER_D.sub(lambda d: d[1] or r"\delta ", text)
    parsed = latex2sympy(
        letters.translate(answer_text.LATEX),
        normalization_config=NormalizationConfig(basic_latex=True, malformed_operators=True),
        conversion_config=ConversionConfig(lowercase_symbols=False),
        convert_degrees=True,
    )
    if isinstance(parsed, sympy.MatrixBase):
        return parsed
    exact = {decimal: sympy.Rational(str(decimal)) for decimal in parsed.atoms(sympy.Float)}
    functions = parsed.atoms(sympy.core.function.AppliedUndef)
    symbols = {function: sympy.Symbol(str(function)) for function in functions}
    symbols[sympy.Symbol("i")] = sympy.I
    return parsed.xreplace(exact | symbols).doit()


def _is_number(text: str) -> bool:
    return isinstance(value := read(text), sympy.Expr) and not value.free_symbols


@_cached_or_none
def _region(text: str) -> Any:
    """Parses a region of the real line (unions are joined by `;`). Returns the set of its
    variables, and the sympy set; None if it is empty or the text is not a region."""
    names: set[sympy.Symbol] = set()
    parts = []
    for part in split(re.sub(r"^⦃\w+(?:∈ℝ)?[|:](.*)⦄$", r"\1", text), ";")[::2]:
        name = re.match(r"([a-zA-Z])∈", part)
        parsed = read(part[2:] if name else part)
        if name:
            names = names | {sympy.Symbol(name[1])}
        if not isinstance(parsed, sympy.Set):
            names, parsed = names | parsed.free_symbols, parsed.as_set()
        parts.append(parsed)
    region = sympy.Union(*parts)
    return None if region is sympy.S.EmptySet else (names, region)


def equal(one: Any, other: Any, scaled: bool = False) -> bool:
    """Return whether two formulas have the same value, to `DIGITS` digits, at all test points where
    both are real; with `scaled` up to a constant factor. Matrices are compared by element."""
    if isinstance(one, sympy.MatrixBase) or isinstance(other, sympy.MatrixBase):
        same_shape = getattr(one, "shape", None) == getattr(other, "shape", None)
        return same_shape and all(map(equal, one.flat(), other.flat()))
    if not isinstance(one, sympy.Expr) or not isinstance(other, sympy.Expr):
        return False
    if one == other or (one.is_Rational and other.is_Rational):
        return bool(one == other)
    names = sorted(one.free_symbols | other.free_symbols, key=str)
    pairs = []
    for n in range(6 if names else 1):  # rational points of both signs
        point = {
            name: (-1) ** (n * index + n) * sympy.Rational(7 * n + 11 * index + 3, 5 + index)
            for index, name in enumerate(names)
        }
        pair = [formula.subs(point).evalf(DIGITS) for formula in (one, other)]
        if all(value.is_number and value.is_finite for value in pair):
            pairs.append(pair)
    pairs = [pair for pair in pairs if all(value.is_real for value in pair)] or pairs
    if scaled and pairs:
        first, second = pairs[0]
        pairs = [[a * second, b * first] for a, b in pairs] if first and second else []
    tiny = sympy.Float(f"1e-{DIGITS - 20}")
    return bool(pairs) and all(abs(a - b) <= tiny * max(abs(a), abs(b)) for a, b in pairs)
