"""Decide `[[ … ]]` and `[ … ]`; the outcome is None where only the machine tells."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megarl.migrate.shell import patterns
from megarl.migrate.shell.machine import Machine, Undecided
from megarl.migrate.shell.state import Array
from megarl.migrate.shell.words import expand_pattern, expand_text

_NUMBERS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
}
_TEXTS = ("=", "==", "!=", "=~", "<", ">", "-nt", "-ot", "-ef")
_UNARY = re.compile(r"-[a-hknoprstuvwxzGLNORS]")
# A regular expression that means the same in POSIX and here, and cannot take long.
_PLAIN_EXPRESSION = re.compile(r"\^?(?:[\w ,:/=@-]|\\\.|\.|\[[\w.^,/-]+\]|(?<=[\w.\]])[*+?])*\$?")


class ShellTestError(ValueError):
    """A test is not written as bash wants it; its status is 2."""


@dataclass(slots=True, kw_only=True)
class ConditionReader:
    """A reader of a shell test. tokens: what is left; double: it is `[[ … ]]`, whose tokens are not expanded yet."""

    machine: Machine
    tokens: list[str]
    double: bool

    def run(self) -> bool | None:
        """Return the outcome, None if it is not known."""
        if not self.tokens:
            return False
        result = self.either()
        if self.tokens:
            raise ShellTestError
        return result

    def either(self) -> bool | None:
        result = self.both()
        while self.accept("||", "-o"):
            other = self.both()
            result = True if result or other else None if result is None or other is None else False
        return result

    def both(self) -> bool | None:
        result = self.negated()
        while self.accept("&&", "-a"):
            other = self.negated()
            result = False if result is False or other is False else None if result is None or other is None else True
        return result

    def accept(self, double: str, single: str) -> bool:
        """Take the next token if it is this operator of the kind of test."""
        if self.tokens and self.tokens[0] == (double if self.double else single):
            self.tokens.pop(0)
            return True
        return False

    def negated(self) -> bool | None:
        if self.tokens and self.tokens[0] == "!" and len(self.tokens) > 1 and not self.is_binary():
            self.tokens.pop(0)
            result = self.negated()
            return None if result is None else not result
        if self.tokens and self.tokens[0] == "(" and not self.is_binary():
            self.tokens.pop(0)
            result = self.either()
            if not self.tokens or self.tokens.pop(0) != ")":
                raise ShellTestError
            return result
        return self.primary()

    def is_binary(self) -> bool:
        return len(self.tokens) >= 3 and (self.tokens[1] in _NUMBERS or self.tokens[1] in _TEXTS)

    def primary(self) -> bool | None:
        if not self.tokens:
            raise ShellTestError
        if self.is_binary():
            left, operator, right = self.tokens[:3]
            del self.tokens[:3]
            return self.numbers(left, operator, right) if operator in _NUMBERS else self.texts(left, operator, right)
        if len(self.tokens) >= 2 and _UNARY.fullmatch(self.tokens[0]):
            operator, operand = self.tokens[:2]
            del self.tokens[:2]
            return self.unary(operator, self.text(operand))
        return self.is_filled(self.text(self.tokens.pop(0)))

    def text(self, token: str) -> str:
        return expand_text(self.machine, token) if self.double else token

    def is_filled(self, text: str) -> bool | None:
        known = self.machine.holes.assume(text)
        if known is not None:
            return known != ""
        return True if len(text) > len(self.machine.holes.within(text)) else None

    def unary(self, operator: str, operand: str) -> bool | None:
        if operator in ("-n", "-z"):
            filled = self.is_filled(operand)
            return filled if operator == "-n" or filled is None else not filled
        if operator == "-o":
            return None
        if operator == "-v":
            name, _, key = operand.partition("[")
            value = self.machine.get(name)
            if value is None:
                self.machine.unset.setdefault(name, self.machine.line)
                return False
            if isinstance(value, Array):
                return (key[:-1] or "0") in map(str, value.items)
            return None if self.machine.holes.within(value) else True
        # Files, terminals and the like are the machine's; but no file has an empty name.
        return False if operand == "" else None

    def numbers(self, left: str, operator: str, right: str) -> bool | None:
        sides = []
        for token in (left, right):
            text = self.text(token)
            if not self.double:
                known = self.machine.holes.assume(text)
                if known is None:
                    return None
                if not re.fullmatch(r"\s*[-+]?\d{1,18}\s*", known):
                    raise ShellTestError
                sides.append(int(known))
                continue
            try:
                sides.append(self.machine.calculate(text))
            except Undecided as undecided:
                if "bash refuses" in undecided.why:
                    raise ShellTestError from None
                return None
        return _NUMBERS[operator](*sides)

    def texts(self, left: str, operator: str, right: str) -> bool | None:
        text, holes = self.text(left), self.machine.holes
        if operator in ("=", "==", "!="):
            if self.double:
                result = self.matches(text, expand_pattern(self.machine, right))
            else:
                result = holes.may_equal(text, right)
            return result if operator != "!=" or result is None else not result
        known, other = holes.assume(text), holes.assume(self.text(right))
        if operator == "=~" and self.double and known is not None and other is not None:
            self.machine.state.set("BASH_REMATCH", self.machine.hole("$BASH_REMATCH", "the parts of a match"))
            is_plain = _PLAIN_EXPRESSION.fullmatch(right) and sum(map(other.count, "*+?")) <= 2
            return re.search(other, known) is not None if is_plain else None
        return None

    def matches(self, text: str, pattern: str) -> bool | None:
        """Return whether a text is what a pattern says; None if a hole leaves that open."""
        holes = self.machine.holes
        if not re.search(r"(?<!\\)[*?\[]", pattern):
            return holes.may_equal(text, re.sub(r"\\(.)", r"\1", pattern, flags=re.DOTALL))
        known, wanted = holes.assume(text), holes.assume(pattern)
        if pattern.strip("*") == "":
            return True
        if known is None or wanted is None:
            return None
        try:
            return patterns.matches(wanted, known)
        except patterns.PatternError:
            return None
