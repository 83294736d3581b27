"""The filter language of `--where`: comparisons with and, or, not, in, is null, contains.

    advantage > 1 and age_steps <= 3
    verdict in ('timeout', 'crash') or not stored
    completion_text contains 'boxed' and last_used_step is not null

It is parsed here into an Arrow expression; nothing of it is ever evaluated as code. Names are
columns; text is in single or double quotes; numbers may be negative or in scientific notation.
"""

import re
from dataclasses import dataclass
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.compute as pc

from grpo_replay.errors import UsageError, did_you_mean

_TOKEN = re.compile(
    r"\s*(?:(?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?![A-Za-z_]))"
    r"|(?P<text>'[^']*'|\"[^\"]*\")"
    r"|(?P<word>[A-Za-z_][A-Za-z0-9_]*)"
    r"|(?P<symbol><=|>=|==|!=|<>|[=<>(),]))"
)
_KEYWORDS = {"and", "or", "not", "in", "is", "null", "contains", "true", "false"}
_COMPARISONS = {"=": "==", "==": "==", "!=": "!=", "<>": "!=", "<": "<", "<=": "<=", ">": ">"} | {
    ">=": ">="
}


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str  # number, text, word, symbol, end
    text: str
    at: int  # position in the filter


@dataclass(frozen=True, slots=True)
class Filter:
    """A parsed filter: the Arrow expression, and the columns that it needs."""

    expression: pc.Expression
    columns: frozenset[str]


def parse_where(text: str, schema: pa.Schema) -> Filter:
    """The filter over the columns of `schema`.

    Raises UsageError that points at the character: unknown column, wrong type, bad syntax.
    """
    parser = _Parser(text, schema)
    expression = parser.parse()
    return Filter(expression, frozenset(parser.columns))


class _Parser:
    def __init__(self, text: str, schema: pa.Schema) -> None:
        self.text = text
        self.schema = schema
        self.columns: set[str] = set()
        self.tokens = self._tokens()
        self.position = 0

    def parse(self) -> pc.Expression:
        expression = self._or()
        if self._now.kind != "end":
            self._fail(self._now, f"{self._now.text!r} is not expected here: use and, or, or stop")
        return expression

    def _tokens(self) -> list[_Token]:
        tokens, at, end = [], 0, len(self.text.rstrip())
        while at < end:
            match = _TOKEN.match(self.text, at)
            if match is None:
                start = at + len(self.text[at:]) - len(self.text[at:].lstrip())
                what = (
                    "this quote is never closed" if self.text[start] in "'\"" else "not understood"
                )
                self._fail(_Token("symbol", self.text[start], start), what)
            kind = str(match.lastgroup)
            tokens.append(_Token(kind, match.group(kind), match.start(kind)))
            at = match.end()
        return [*tokens, _Token("end", "the end", end)]

    @property
    def _now(self) -> _Token:
        return self.tokens[self.position]

    def _next(self) -> _Token:
        token = self._now
        self.position += 1
        return token

    def _is(self, *words: str) -> bool:
        return self._now.kind in ("word", "symbol") and self._now.text.lower() in words

    def _accept(self, *words: str) -> bool:
        if self._is(*words):
            self.position += 1
            return True
        return False

    def _expect(self, word: str) -> None:
        if not self._accept(word):
            self._fail(self._now, f"expected {word!r}, found {self._now.text!r}")

    def _or(self) -> pc.Expression:
        left = self._and()
        while self._accept("or"):
            left = left | self._and()
        return left

    def _and(self) -> pc.Expression:
        left = self._not()
        while self._accept("and"):
            left = left & self._not()
        return left

    def _not(self) -> pc.Expression:
        if self._accept("not"):
            return ~self._not()
        if self._accept("("):
            inner = self._or()
            self._expect(")")
            return inner
        return self._condition()

    def _condition(self) -> pc.Expression:
        token = self._now
        column = self._column()
        if self._accept("is"):
            missing = not self._accept("not")
            self._expect("null")
            return pc.is_null(pc.field(column)) if missing else ~pc.is_null(pc.field(column))
        if self._accept("contains"):
            return self._contains(token, column)
        negated = self._accept("not")
        if self._accept("in"):
            inside = pc.field(column).isin(self._literals(column))
            # A null is neither inside nor outside, as in SQL.
            return ~inside & ~pc.is_null(pc.field(column)) if negated else inside
        if negated:
            self._fail(self._now, f"expected 'in' after 'not', found {self._now.text!r}")
        if self._now.text in _COMPARISONS and self._now.kind == "symbol":
            return self._comparison(column)
        if pa.types.is_boolean(self._type(column)):
            return pc.field(column)
        self._fail(
            self._now,
            f"expected a comparison after {column!r} (=, !=, <, <=, >, >=, in, is null, "
            f"contains), found {self._now.text!r}",
        )

    def _contains(self, token: _Token, column: str) -> pc.Expression:
        if not pa.types.is_string(self._type(column)):
            self._fail(token, f"contains is for text, and {column!r} is {self._type(column)}")
        return pc.match_substring(pc.field(column), str(self._literal(column)))

    def _comparison(self, column: str) -> pc.Expression:
        operator = _COMPARISONS[self._next().text]
        at = self._now
        field = pc.field(column)
        if at.kind == "word" and at.text.lower() not in _KEYWORDS:
            other_column = self._column()
            if _family(self._type(column)) != _family(self._type(other_column)):
                self._fail(at, f"{column!r} and {other_column!r} cannot be compared")
            value: Any = pc.field(other_column)
        else:
            value = pc.scalar(self._literal(column))
        return {
            "==": field == value,
            "!=": field != value,
            "<": field < value,
            "<=": field <= value,
            ">": field > value,
            ">=": field >= value,
        }[operator]

    def _column(self) -> str:
        token = self._next()
        if token.kind != "word" or token.text.lower() in _KEYWORDS:
            self._fail(token, f"expected the name of a column, found {token.text!r}")
        if token.text not in self.schema.names:
            hint = did_you_mean(token.text, self.schema.names)
            names = [field.name for field in self.schema if not pa.types.is_list(field.type)]
            self._fail(token, f"no column {token.text!r}{hint}; there are {', '.join(names)}")
        if pa.types.is_list(self.schema.field(token.text).type):
            self._fail(
                token,
                f"{token.text!r} is a list; filter on prompt_tokens or completion_tokens, its "
                "length",
            )
        self.columns.add(token.text)
        return token.text

    def _type(self, column: str) -> pa.DataType:
        return self.schema.field(column).type

    def _literals(self, column: str) -> pa.Array:
        start = self._now
        self._expect("(")
        values = [self._literal(column)]
        while self._accept(","):
            values.append(self._literal(column))
        self._expect(")")
        kind = self._type(column)
        if pa.types.is_integer(kind) and any(value != int(value) for value in values):
            self._fail(start, f"{column!r} is {kind}, which cannot be one of these")
        return pa.array(values, kind)

    def _literal(self, column: str) -> Any:
        token = self._next()
        wanted = _family(self._type(column))
        value: Any = None
        if token.kind == "number":
            value = float(token.text) if re.search(r"[.eE]", token.text) else int(token.text)
        elif token.kind == "text":
            value = token.text[1:-1]
        elif token.kind == "word" and token.text.lower() in ("true", "false"):
            value = token.text.lower() == "true"
        if value is None:
            hint = "; write 'is null'" if token.text.lower() == "null" else ""
            self._fail(token, f"expected {wanted}, found {token.text!r}{hint}")
        found = {bool: "true or false", str: "text in quotes"}.get(type(value), "a number")
        if found != wanted:
            self._fail(token, f"{column!r} is compared with {wanted}, found {token.text}")
        return value

    def _fail(self, token: _Token, message: str) -> NoReturn:
        raise UsageError(f"--where: {message}\n  {self.text}\n  {' ' * token.at}^")


def _family(kind: pa.DataType) -> str:
    if pa.types.is_boolean(kind):
        return "true or false"
    return "text in quotes" if pa.types.is_string(kind) else "a number"
