"""The filter language of `--where`: comparisons with and, or, not, in, is null, contains.

    advantage > 1 and age_steps <= 3
    verdict in ('timeout', 'crash') or not stored
    completion_text contains 'boxed' and last_used_step is not null

The filter is parsed into an Arrow expression and never evaluated as code. Names are columns, text
is in single or double quotes, numbers may be negative or in scientific notation.

A parser of our own: `ast` would read the `\\b` of '\\boxed' as an escape, knows neither `=`,
`is null` nor `contains`, and its syntax errors do not say what is allowed; pyarrow parses no text,
and DuckDB would be a new dependency.
"""

import operator
import re
from collections.abc import Callable
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
_COMPARISONS: dict[str, Callable[[Any, Any], pc.Expression]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "<>": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str  # number, text, word, symbol, end
    text: str
    position: int  # in the filter, characters

    @property
    def keyword(self) -> str | None:
        word = self.text.lower()
        return word if self.kind == "word" and word in _KEYWORDS else None


@dataclass(frozen=True, slots=True)
class Filter:
    """A parsed filter: the Arrow expression and the columns it reads."""

    expression: pc.Expression
    columns: frozenset[str]


def parse_where(text: str, schema: pa.Schema) -> Filter:
    """The filter over the columns of `schema`.

    Raises UsageError, pointing at the character, for an unknown column, a wrong type or bad syntax.
    """
    parser = _Parser(text, schema)
    try:
        expression = parser.parse()
    except RecursionError:
        raise UsageError("--where: too many parentheses or nots within each other") from None
    return Filter(expression, frozenset(parser.columns))


class _Parser:
    """Recursive descent: `or` binds weakest, then `and`, then `not`."""

    def __init__(self, text: str, schema: pa.Schema) -> None:
        self.text = text
        self.schema = schema
        self.columns: set[str] = set()
        self.tokens = self._tokenize()
        self.index = 0

    def parse(self) -> pc.Expression:
        expression = self._or()
        if self._token.kind != "end":
            self._fail(self._token, f"unexpected {self._token.text!r}: use and, or, or stop")
        return expression

    def _tokenize(self) -> list[_Token]:
        tokens, position, end = [], 0, len(self.text.rstrip())
        while position < end:
            match = _TOKEN.match(self.text, position)
            if match is None:
                start = end - len(self.text[position:end].lstrip())
                quote = self.text[start] in "'\""
                message = "this quote is never closed" if quote else "not understood"
                self._fail(_Token("symbol", self.text[start], start), message)
            kind = str(match.lastgroup)
            tokens.append(_Token(kind, match.group(kind), match.start(kind)))
            position = match.end()
        return [*tokens, _Token("end", "the end", end)]

    @property
    def _token(self) -> _Token:
        return self.tokens[self.index]

    def _next(self) -> _Token:
        token = self._token
        self.index += 1
        return token

    def _accept(self, text: str) -> bool:
        found = self._token.kind in ("word", "symbol") and self._token.text.lower() == text
        self.index += found
        return found

    def _expect(self, text: str) -> None:
        if not self._accept(text):
            self._fail(self._token, f"expected {text!r}, found {self._token.text!r}")

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
        start = self._token
        column = self._column()
        field, kind = pc.field(column), self.schema.field(column).type
        if self._accept("is"):
            negated = self._accept("not")
            self._expect("null")
            return field.is_valid() if negated else field.is_null()
        if self._accept("contains"):
            if not pa.types.is_string(kind):
                self._fail(start, f"contains is for text, and {column!r} is {kind}")
            return pc.match_substring(field, str(self._literal(column)))
        if self._accept("not"):
            if self._token.keyword != "in":
                self._fail(self._token, f"expected 'in' after 'not', found {self._token.text!r}")
            # As in SQL, a null is neither in the list nor outside it.
            return ~self._in(column) & field.is_valid()
        if self._token.keyword == "in":
            return self._in(column)
        if self._token.text in _COMPARISONS and self._token.kind == "symbol":
            return _COMPARISONS[self._next().text](field, self._operand(column))
        if pa.types.is_boolean(kind):
            return field
        self._fail(
            self._token,
            f"expected a comparison after {column!r} (=, !=, <, <=, >, >=, in, is null, "
            f"contains), found {self._token.text!r}",
        )

    def _in(self, column: str) -> pc.Expression:
        self._expect("in")
        start, kind = self._token, self.schema.field(column).type
        self._expect("(")
        values = [self._literal(column)]
        while self._accept(","):
            values.append(self._literal(column))
        self._expect(")")
        whole = not any(isinstance(value, float) and not value.is_integer() for value in values)
        try:
            if whole or not pa.types.is_integer(kind):
                return pc.field(column).isin(pa.array(values, kind))
        except (pa.ArrowException, OverflowError):
            pass  # beyond the range of the type
        self._fail(start, f"{column!r} is {kind}, which cannot be one of these")

    def _operand(self, column: str) -> pc.Expression:
        """The right-hand side of a comparison: another column or a literal."""
        token = self._token
        if token.kind != "word" or token.keyword:
            value, kind = self._literal(column), self.schema.field(column).type
            # In float32, 0.1 is not the 0.1 of float64.
            return pc.scalar(pa.scalar(float(value), kind) if pa.types.is_float32(kind) else value)
        other = self._column()
        if self._family(column) != self._family(other):
            self._fail(token, f"{column!r} and {other!r} cannot be compared")
        return pc.field(other)

    def _column(self) -> str:
        token = self._next()
        if token.kind != "word" or token.keyword:
            self._fail(token, f"expected the name of a column, found {token.text!r}")
        if token.text not in self.schema.names:
            hint = did_you_mean(token.text, self.schema.names)
            names = [field.name for field in self.schema if not pa.types.is_list(field.type)]
            self._fail(token, f"no column {token.text!r}{hint}; the columns are {', '.join(names)}")
        if pa.types.is_list(self.schema.field(token.text).type):
            self._fail(
                token,
                f"{token.text!r} is a list; filter by its length instead, with prompt_tokens or "
                "completion_tokens",
            )
        self.columns.add(token.text)
        return token.text

    def _literal(self, column: str) -> Any:
        token = self._next()
        wanted = self._family(column)
        value: Any
        if token.kind == "number":
            found, value = "a number", self._number(token)
        elif token.kind == "text":
            found, value = "text in quotes", token.text[1:-1]
        elif token.keyword in ("true", "false"):
            found, value = "true or false", token.keyword == "true"
        else:
            hint = "; write 'is null'" if token.keyword == "null" else ""
            self._fail(token, f"expected {wanted}, found {token.text!r}{hint}")
        if found != wanted:
            self._fail(token, f"{column!r} is compared with {wanted}, found {token.text}")
        return value

    def _number(self, token: _Token) -> int | float:
        if re.search(r"[.eE]", token.text):
            return float(token.text)
        if len(token.text) > 19 or not -(2**63) <= int(token.text) < 2**63:
            self._fail(token, f"an integer of {len(token.text):,} digits does not fit in 64 bits")
        return int(token.text)

    def _family(self, column: str) -> str:
        """What a column can be compared with, in words."""
        kind = self.schema.field(column).type
        if pa.types.is_boolean(kind):
            return "true or false"
        return "text in quotes" if pa.types.is_string(kind) else "a number"

    def _fail(self, token: _Token, message: str) -> NoReturn:
        raise UsageError(f"--where: {message}\n  {self.text}\n  {' ' * token.position}^")
