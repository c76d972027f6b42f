"""Evaluate the shell's arithmetic: whole numbers of 64 bits, C's operators, and variables by their names."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

_TOKEN = re.compile(
    r"\s*(0[xX][0-9a-fA-F]+|\d+#[\w@]+|\d+|[A-Za-z_]\w*(?:\[[^\]]*\])?"
    r"|<<=|>>=|\*\*|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|[-+*/%<>=!~&|^?:(),])"
)
# By its strength, what each operator of two operands does; 1 is the weakest. `**` groups from the right.
_BINARY: tuple[Mapping[str, Callable[[int, int], int]], ...] = (
    {"|": lambda a, b: a | b},
    {"^": lambda a, b: a ^ b},
    {"&": lambda a, b: a & b},
    {"==": lambda a, b: int(a == b), "!=": lambda a, b: int(a != b)},
    {
        "<": lambda a, b: int(a < b),
        ">": lambda a, b: int(a > b),
        "<=": lambda a, b: int(a <= b),
        ">=": lambda a, b: int(a >= b),
    },
    {"<<": lambda a, b: a << (b & 63), ">>": lambda a, b: a >> (b & 63)},
    {"+": lambda a, b: a + b, "-": lambda a, b: a - b},
    {"*": lambda a, b: a * b, "/": lambda a, b: _divide(a, b), "%": lambda a, b: a - b * _divide(a, b)},
)
_ASSIGNING = frozenset(["=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>="])
_DEEPEST = 50


class ShellArithmeticError(ValueError):
    """An expression is none that the shell computes."""


def _divide(one: int, other: int) -> int:
    if other == 0:
        raise ShellArithmeticError("division by 0")
    result = abs(one) // abs(other)
    return result if (one < 0) == (other < 0) else -result


def _wrap(number: int) -> int:
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def calculate(text: str, read: Callable[[str], str], write: Callable[[str, str], None], depth: int = 0) -> int:
    """Return the value of an expression.

    read, write: return and set a variable; an index in brackets belongs to its name. The text of a variable is an
    expression too, up to `_DEEPEST` of them in one another.
    """
    if depth > _DEEPEST:
        raise ShellArithmeticError("variables that refer to each other")
    tokens, index = [], 0
    text = text.rstrip()
    while index < len(text):
        found = _TOKEN.match(text, index)
        if not found:
            raise ShellArithmeticError(f"not arithmetic: {text[index:][:40]}")
        tokens.append(found[1])
        index = found.end()
    if not tokens:
        return 0
    if len(tokens) > 2000:
        raise ShellArithmeticError("more than 2000 numbers and operators")
    expression = _Expression(tokens=tokens, read=read, write=write, depth=depth)
    result = expression.comma()
    if expression.tokens:
        raise ShellArithmeticError(f"unexpected: {expression.tokens[0]}")
    return result


@dataclass(slots=True, kw_only=True)
class _Expression:
    tokens: list[str]
    read: Callable[[str], str]
    write: Callable[[str, str], None]
    depth: int
    # Above 0 within the branch that is not taken: assignments and divisions there do nothing.
    skipped: int = field(default=0)
    nested: int = field(default=0)

    def accept(self, *tokens: str) -> str | None:
        return self.tokens.pop(0) if self.tokens and self.tokens[0] in tokens else None

    def expect(self, token: str) -> None:
        if not self.accept(token):
            raise ShellArithmeticError(f"no {token}")

    def comma(self) -> int:
        result = self.assignment()
        while self.accept(","):
            result = self.assignment()
        return result

    def assignment(self) -> int:
        self.nested += 1
        if self.nested > _DEEPEST:
            raise ShellArithmeticError(f"more than {_DEEPEST} expressions in one another")
        if len(self.tokens) > 1 and self.tokens[1] in _ASSIGNING and self.tokens[0][0].isidentifier():
            name, operator = self.tokens.pop(0), self.tokens.pop(0)
            value = self.assignment()
            if operator != "=":
                value = self.compute(operator[:-1], self.value(name), value)
            result = self.assign(name, value)
        else:
            result = self.ternary()
        self.nested -= 1
        return result

    def assign(self, name: str, value: int) -> int:
        if not self.skipped:
            self.write(name, str(_wrap(value)))
        return _wrap(value)

    def branch(self, taken: bool, parse: Callable[[], int]) -> int:
        self.skipped += not taken
        result = parse()
        self.skipped -= not taken
        return result

    def ternary(self) -> int:
        condition = self.either()
        if not self.accept("?"):
            return condition
        first = self.branch(condition != 0, self.comma)
        self.expect(":")
        second = self.branch(condition == 0, self.assignment)
        return first if condition else second

    def either(self) -> int:
        result = self.both()
        while self.accept("||"):
            other = self.branch(result == 0, self.both)
            result = int(bool(result or other))
        return result

    def both(self) -> int:
        result = self.binary(0)
        while self.accept("&&"):
            other = self.branch(result != 0, lambda: self.binary(0))
            result = int(bool(result and other))
        return result

    def binary(self, strength: int) -> int:
        if strength == len(_BINARY):
            return self.power()
        result = self.binary(strength + 1)
        while operator := self.accept(*_BINARY[strength]):
            result = self.compute(operator, result, self.binary(strength + 1))
        return result

    def compute(self, operator: str, one: int, other: int) -> int:
        if self.skipped and operator in "/%":
            return 0
        return _wrap(next(level[operator] for level in _BINARY if operator in level)(one, other))

    def power(self) -> int:
        base = self.unary()
        if not self.accept("**"):
            return base
        exponent = self.power()
        if exponent < 0:
            raise ShellArithmeticError("a negative exponent")
        return _wrap(pow(base, exponent, 1 << 64))

    def unary(self) -> int:
        operator = self.accept("++", "--", "!", "~", "-", "+")
        if operator is None:
            return self.primary()
        if operator in ("++", "--") and self.tokens and self.tokens[0][0].isidentifier():
            name = self.tokens.pop(0)
            return self.assign(name, self.value(name) + (1 if operator == "++" else -1))
        self.nested += 1
        if self.nested > _DEEPEST:
            raise ShellArithmeticError(f"more than {_DEEPEST} expressions in one another")
        value = self.unary()
        self.nested -= 1
        return _wrap({"!": int(not value), "~": ~value, "-": -value, "--": value}.get(operator, value))

    def primary(self) -> int:
        if self.accept("("):
            result = self.comma()
            self.expect(")")
            return result
        if not self.tokens:
            raise ShellArithmeticError("an operand is missing")
        token = self.tokens.pop(0)
        if token[0].isidentifier():
            value = self.value(token)
            if operator := self.accept("++", "--"):
                self.assign(token, value + (1 if operator == "++" else -1))
            return value
        return _number(token)

    def value(self, name: str) -> int:
        return calculate(self.read(name), self.read, self.write, self.depth + 1)


def _number(token: str) -> int:
    try:
        if "#" in token:
            base, _, digits = token.partition("#")
            return _wrap(int(digits, int(base)))
        is_octal = token.startswith("0") and token.isdigit()
        return _wrap(int(token, 8) if is_octal else int(token, 0))
    except ValueError:
        raise ShellArithmeticError(f"no number: {token[:40]}") from None
