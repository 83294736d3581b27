"""The text of answers: finds the boxes of a completion, and normalises their content.

Normalised text has no spaces. Words stand in double quotes, braces of sets are ⦃⦄, relations are
single signs, ¤ is a dollar, and `,` and `;` stand for "and" and "or".
"""

import re
from fractions import Fraction

_BOX = re.compile(r"\\(?:boxed|fbox)(?:\s*(\{)|\s*(-?\w+(?:[./]\w+)*))|\\[{}]|[{}]")
_JOINT = re.compile(r"[\s$]*(?:,|\band\b|\bor\b)[\s$]*")


def last_boxes(completion: str) -> list[str]:
    """Return the content of the last complete box that is not empty, then, if only commas, "and" or
    "or" separate earlier boxes from it, all their contents joined by commas. [] without one."""
    boxes: list[tuple[int, int, int, int]] = []  # start and end of a box, then of its content
    opened: list[re.Match[str] | None] = []
    for token in _BOX.finditer(completion):
        if token[2]:
            boxes.append((*token.span(), *token.span(2)))
        elif token[1] or token[0] == "{":
            opened.append(token if token[1] else None)
        elif token[0] == "}" and opened and (box := opened.pop()):
            boxes.append((box.start(), token.end(), box.end(), token.start()))
    contents: list[str] = []
    next_start = 0
    for start, end, content_start, content_end in reversed(boxes):
        between = completion[end:next_start]
        if contents and not _JOINT.fullmatch(between):
            break
        content = completion[content_start:content_end]
        if content.strip(" \n\t${}~"):
            contents, next_start = [content, *contents], start
    joined = [",".join(contents)] if len(contents) > 1 else []
    return contents[-1:] + joined


_UNITS = {
    "m": "mm 1/1000 millimeter 1/1000 cm 1/100 centimeter 1/100 meter 1 km 1000 kilometer 1000",
    "ft": "in 1/12 inch 1/12 inche 1/12 feet 1 foot 1 yd 3 yard 3 mi 5280 mile 5280",
    "s": "sec 1 second 1 min 60 minute 60 h 3600 hr 3600 hour 3600 day 86400",
    "lb": "pound 1",
    "g": "gm 1 gram 1 kg 1000 kilogram 1000",
    "¤": "dollar 1 cent 1/100 ¢ 1/100",
    "mph": "",
}
UNITS = {
    name: (base, Fraction(factor))
    for base, words in _UNITS.items()
    for name, factor in re.findall(r"(\S+) (\S+)", f"{base} 1 {words}")
}
"""The base unit of each unit, and the factor to it."""

_PLAIN_UNITS = "|".join(name for name in UNITS if len(name) > 1)
_FUNCTIONS = "sqrt|arcsin|arccos|arctan|sin|cos|tan|cot|sec|csc|log|ln|pi|infty|theta"
_TOKEN = r"(\d|[a-zA-Z]|\\(?!sqrt|frac)[a-zA-Z]+)"
_GROUP = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
_SIGNS = str.maketrans({
    "−": "-", "–": "-", "×": "*", "·": "*", "÷": "/", "π": r"\pi ", "∞": r"\infty ", "²": "^2",
    "³": "^3", "½": r"\frac{1}{2}", "⟨": "(", "⟩": ")", "√": r"\sqrt ", "\u00a0": " ", "\n": " ",
})  # fmt: skip
_REWRITES = [(re.compile(pattern), replacement) for pattern, replacement in (
    # LaTeX
    (r"\\(?:left|right|[bB]igg?[lrm]?)(?![a-zA-Z])\.?|\\(?:boxed|fbox|displaystyle)", ""),
    (r"\\[dtc]frac", r"\\frac"),
    (r"\\\{|\\lbrace(?![a-z])", "⦃"), (r"\\\}|\\rbrace(?![a-z])", "⦄"),
    (r"\\langle", "("), (r"\\rangle", ")"), (r"\\[lr]?vert(?![a-z])|\\mid(?![a-z])", "|"),
    (r"\\(begin|end)\{(?:b|small|)(?:matrix|array)\}(?:\{[lcr]*\})?", r"\\\1{pmatrix}"),
    (r"[\[(]\s*(\\begin\{pmatrix\}[^\[\](]*\\end\{pmatrix\})\s*[\])]", r"\1"),
    (r"\\(?:text\w*|mbox|math(?:rm|bf|it|sf)|emph)\s*\{([^{}]*)\}", r'"\1"'),
    # Money, thousands, spaces
    (r"\\\$|(?<![\\\w])\$(?=\d)(?!.*\$)", "¤"), (r"\\[()]|\$", ""),
    (r"(?<=\d)(?:\s*,\s*\\!\s*|\{,\}|\\[,;: ]|~| )(?=\d{3}(?!\d))", ""),
    (r"(?<!\\)\\[,;:!> ]|\\q?quad(?![a-z])|~", " "),
    # Words
    (r'\\%|"?\s*(?:percent(?:age)?|pct)\s*"?', "%"),
    (r'\^\s*\{?\s*\\circ\s*\}?|\\degree|"?\s*\bdegrees?\b\s*"?', "°"),
    (r'"\s*,?\s*and\s*"|\band\b|\\land(?![a-z])', ","),
    (r'"\s*,?\s*or\s*"|\bor\b|\\lor(?![a-z])', ";"), (r",[\s,]*,", ","),
    (r'"\s*([-\d.:/]*\d)\.?\s*"', r"\1"),
    (r'"\s*([-\d.:/]*\d)\s*([A-Za-z][A-Za-z. ]*)"', r'\1"\2"'),
    (rf'(?<![\\A-Za-z"])({_FUNCTIONS})(?![A-Za-z])', r"\\\1 "),
    (r'(?<![\\A-Za-z"])inf(?:inity)?(?![A-Za-z])|\+\s*\\infty', r"\\infty "),
    (r"(?<=[\d})])\s+([A-Za-z][A-Za-z.]{2,}(?:\s+[A-Za-z]+)*)", r'"\1"'),
    (rf"(?<=[\d}})])\s*({_PLAIN_UNITS})s?(?![A-Za-z])", r'"\1"'),
    (r'\\emptyset|\\varnothing|∅|⦃\s*⦄|"?\bno (?:real )?solutions?\b"?', '"nosolution"'),
    (r"[¤£€]\s*([\d,.]*\d|[^,;¤£€\"]+)(?:\"[^\"]*\")?", lambda m: f'{m[1]}"{m[0][0]}"'),
    (r'^"?\s*(?:[Tt]he )?(?:final )?[Aa]nswer(?: is)?:?\s*"?', ""),
    (r'^"?\s*(?:[Oo]ption|[Cc]hoice)[\s"]+(?=\(?[A-J]\b)', '"'),
    # Relations and sets
    (r"\\leq?(?:slant)?(?![a-z])|<=", "≤"), (r"\\geq?(?:slant)?(?![a-z])|>=", "≥"),
    (r"\\neq?(?![a-z])|!=|\\not\s*=", "≠"), (r"\\lt(?![a-z])", "<"), (r"\\gt(?![a-z])", ">"),
    (r"\\in(?![a-z])", "∈"), (r"\\cup(?![a-z])", "∪"), (r"\\approx(?![a-z])", "≈"),
    (r"\\setminus(?![a-z])|\\backslash", "∖"),
    (r'\\mathbb\s*\{?\s*R\s*\}?|"?\s*all real numbers\s*"?', "ℝ"),
    # Formulas
    (r"(?<=\d)[eE]([+-]?\d+)(?![\d_])", r"*10^{\1}"),
    (r"(\d+)\s+(\d+)\s*/\s*(\d+)", r"\1\\frac{\2}{\3}"), 
    (r"(?<![\d:])(\d+)\s*:\s*(\d+)(?![\d:])", r"\1/\2"), (r"\\pmod\s*\{?(\w+)\}?", r'"mod \1"'),
    (r"(?<=\d)\s*:\s*(?=\d)", '"to"'),
    (r"\\(?:cdot|times|ast)(?![a-z])|\*", r"\\cdot "), (r"\\div(?![a-z])", "/"),
    (r"(\d*)\.(\d*)\\overline\{(\d+)\}", lambda match: _repeating(*match.groups())),
    (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (rf"\\(frac|sqrt)\s*{_TOKEN}", r"\\\1{\2}"), (rf"(\\frac\s*{_GROUP})\s*{_TOKEN}", r"\1{\2}"),
    (r"([\^_])\{([\da-zA-Z])\}", r"\1\2"), (r"\^(\d{2,})", r"^{\1}"),
    (r"(?<![\d.])\.(?=\d)", "0."), (r"^[.,;:=≈\s]+|[.,;:\s]+$", ""),
    (r"(\\[a-zA-Z]+)\s+(?=[a-zA-Z])|\s+", lambda match: match[1] + " " if match[1] else ""),
)]  # fmt: skip


def _repeating(whole: str, digits: str, repeated: str) -> str:
    """Returns a repeating decimal as a fraction: 0.1\\overline{6} is (16 - 1) / 90."""
    value = int(whole + digits + repeated) - int(whole + digits or 0)
    return rf"\frac{{{value}}}{{{'9' * len(repeated)}{'0' * len(digits)}}}"


def normalised(text: str) -> str:
    """The normalised text of an answer, in the notation described at the top of this module."""
    text = text.translate(_SIGNS)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return text


def without_thousands(text: str) -> str:
    """Normalised text without thousands separators; unchanged if it has brackets."""
    number = re.compile(r"(?<![\d.])\d{1,3}(?:,\d{3})+(?!\d)")
    return text if set(text) & set("[(⦃") else number.sub(lambda m: m[0].replace(",", ""), text)


LATEX = str.maketrans({
    "⦃": r"\{", "⦄": r"\}", "≤": r"\leq ", "≥": r"\geq ", "≠": r"\neq ", "∈": r"\in ",
    "∪": r"\cup ", "∖": r"\setminus ", "ℝ": r"\mathbb{R}", "°": r"^{\circ}",
})  # fmt: skip


def split(text: str, marks: str) -> list[str]:
    """Split `text` at those characters of `marks` that are outside all brackets: "a=b" at "=" gives
    ["a", "=", "b"], with the marks at odd indices."""
    parts, depth = [""], 0
    for sign in text:
        depth += (sign in "([{⦃") - (sign in ")]}⦄")
        if depth == 0 and sign in marks:
            parts += [sign, ""]
        else:
            parts[-1] += sign
    return parts


_PLUS, _MINUS = re.compile(r"\\pm(?![a-z]) ?"), re.compile(r"\\mp(?![a-z]) ?")


def members(text: str) -> list[str]:
    """Split a list at commas and semicolons; an unbracketed element with ± or ∓ becomes two."""
    elements = []
    for part in split(text, ",;")[::2]:
        has_both = part[:1] not in set("([⦃") and (_PLUS.search(part) or _MINUS.search(part))
        signs = (("+", "-"), ("-", "+")) if has_both else ()
        elements += [_MINUS.sub(minus, _PLUS.sub(plus, part)) for plus, minus in signs] or [part]
    return elements


_QUANTITY = re.compile(r'(.*[^"])(?:"([^"]+)"(?:\^\{?(\d)\}?)?|([%°]))')
_DIMENSIONS = {"square": 2, "sq": 2, "cubic": 3}
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)")


def quantity(text: str) -> tuple[str, tuple[str, Fraction] | None]:
    """Split a normalised text into value and unit: "3", ("m^2", 1/10000) for 3 square cm, the base
    unit with its power and the factor to it; None without a unit. An unknown unit is its own base.
    """
    match = _QUANTITY.fullmatch(text)
    if not match or ("°" in text and _TRIGONOMETRIC.search(text)):
        return text, None
    if match[4]:
        return match[1], (match[4], Fraction(1))
    name, power = re.sub(r"[.\s]", "", match[2].lower()), int(match[3] or 1)
    for word, dimension in _DIMENSIONS.items():
        if name.startswith(word) and name != word:
            name, power = name.removeprefix(word), dimension
    name = name if name in UNITS else name.removesuffix("s")
    base, factor = UNITS.get(name, (name, Fraction(1)))
    return match[1], (f"{base}^{power}", factor**power)
