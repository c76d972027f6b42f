"""Expand parameters: `$NAME`, `${NAME:-default}`, `${NAME%pattern}`, arrays, lengths and parts."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from megarl.migrate.shell import patterns, syntax
from megarl.migrate.shell.holes import HOLE
from megarl.migrate.shell.machine import Machine, Undecided
from megarl.migrate.shell.state import Array

_HEAD = re.compile(r"([#!]?)([A-Za-z_]\w*|\d+|[@*#?$!-])")
_OPERATION = re.compile(r":?[-=+?]|##?|%%?|//|/[#%]|/|\^\^?|,,?|:|@", re.DOTALL)
_INDIRECT = re.compile(r"[A-Za-z_]\w*|\d+|[@*]")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterExpansion:
    """An expansion of a parameter. prefix: `#` (length), `!` (indirection) or nothing. key: the index of an array."""

    prefix: str
    name: str
    key: str | None
    operation: str
    operand: str

    @classmethod
    def parse(cls, text: str) -> "ParameterExpansion":
        """Read `$NAME` or `${…}`."""
        if not text.startswith("${"):
            return cls(prefix="", name=text[1:], key=None, operation="", operand="")
        body = text[2:-1]
        if body in ("#", "!"):
            return cls(prefix="", name=body, key=None, operation="", operand="")
        found = _HEAD.match(body)
        if not found:
            raise syntax.ShellSyntaxError(f"no parameter: {text[:60]}", 0)
        prefix, name, rest = found[1], found[2], body[found.end() :]
        if prefix and name in "#?-!" and rest:
            # `${#-x}` and its like: the number of arguments, with a default.
            prefix, name, rest = "", prefix, name + rest
        key = None
        if rest.startswith("["):
            try:
                end = syntax.bracket_end(rest, 0)
            except (IndexError, ValueError):
                raise syntax.ShellSyntaxError(f"unclosed: {text[:60]}", 0) from None
            key, rest = rest[1 : end - 1], rest[end:]
        operation = _OPERATION.match(rest)
        if rest and not operation and not (prefix == "!" and rest == "*"):
            raise syntax.ShellSyntaxError(f"no expansion: {text[:60]}", 0)
        sign = operation[0] if operation else rest
        return cls(prefix=prefix, name=name, key=key, operation=sign, operand=rest[len(sign) :])

    @property
    def is_list(self) -> bool:
        """Whether this is all elements of an array, or all arguments."""
        return self.name in ("@", "*") or self.key in ("@", "*")

    @property
    def is_joined(self) -> bool:
        """Whether double quotes make one word of all elements."""
        return self.name == "*" or self.key == "*"


def parameter_values(
    machine: Machine,
    parameter: ParameterExpansion,
    written: str,
    operand: Callable[[str], str],
    pattern: Callable[[str], str],
) -> list[str] | str | None:
    """Return what a parameter expands to: a list for several elements, None where its operand takes its place.

    operand, pattern: expand the source of an operand as text and as a pattern.
    """
    try:
        if parameter.prefix == "!":
            return _indirect(machine, parameter, written, operand, pattern)
        found = _look_up(machine, parameter, operand)
        if parameter.prefix == "#":
            return _length(machine, parameter, found, written)
        if parameter.operation in ("-", ":-", "=", ":=", "+", ":+", "?", ":?"):
            return _default(machine, parameter, found, written, operand)
        if found is None:
            found = machine.missing(parameter.name, written)
        if parameter.operation == ":":
            return _part(machine, parameter, found, operand)
        if parameter.operation:
            return _changed(machine, parameter, found, written, operand, pattern)
    except Undecided as undecided:
        return machine.hole(written, undecided.why)
    except patterns.PatternError as error:
        return machine.hole(written, f"{error} is not followed")
    return found


def _look_up(machine: Machine, parameter: ParameterExpansion, operand: Callable[[str], str]) -> list[str] | str | None:
    value = machine.get(parameter.name)
    if parameter.is_list:
        if isinstance(value, Array):
            return list(value.items.values())
        # A hole may be a list of any length.
        return [] if value is None else [value]
    if isinstance(value, Array):
        if value.named:
            return value.items.get(operand(parameter.key or "0"))
        return value.items.get(machine.index(operand(parameter.key or "0"), value))
    if parameter.key is None or value is None:
        return value
    if machine.index(operand(parameter.key), Array({0: value})) == 0:
        return value
    if machine.holes.within(value):
        raise Undecided(machine.holes.within(value)[0].why)
    return None


def _length(machine: Machine, parameter: ParameterExpansion, found: list[str] | str | None, written: str) -> str:
    if isinstance(found, list):
        value = machine.get(parameter.name)
        if isinstance(value, str) and machine.holes.within(value):
            return machine.hole(written, machine.holes.within(value)[0].why)
        return str(len(found))
    if found is None:
        found = machine.missing(parameter.name, written)
    return machine.holes.derive(written, [found], lambda text: str(len(text)))


def _default(
    machine: Machine,
    parameter: ParameterExpansion,
    found: list[str] | str | None,
    written: str,
    operand: Callable[[str], str],
) -> list[str] | str | None:
    is_set = bool(found) if isinstance(found, list) else found is not None
    if found is not None and is_set:
        text = found if isinstance(found, str) else " ".join(found)
        known = machine.holes.assume(text)
        if known is None and not HOLE.sub("", text):
            # It may be empty.
            return machine.hole(written, machine.holes.within(text)[0].why)
        is_set = known != "" or parameter.operation[0] != ":"
    if found is None:
        machine.unset.setdefault(parameter.name, machine.line)
    sign = parameter.operation[-1]
    if sign == "+":
        return None if is_set else ""
    if is_set:
        return found
    if sign == "=":
        value = operand(parameter.operand)
        machine.assign(parameter.name, value, parameter.key)
        return value
    if sign == "?":
        missing = machine.hole(f"${parameter.name}", f"{parameter.name} is not set in the script, which needs it")
        machine.assign(parameter.name, missing)
        return missing
    return None


def _part(
    machine: Machine, parameter: ParameterExpansion, found: list[str] | str, operand: Callable[[str], str]
) -> list[str] | str:
    first, second = _bounds(parameter.operand)
    start = machine.calculate(operand(first))
    count = None if second is None else machine.calculate(operand(second))
    if isinstance(found, list):
        if parameter.name in "@*":
            found = [machine.state.zero, *found]
            if parameter.operand and start == 0 and count is not None:
                return found[:count]
        value = machine.get(parameter.name)
        if isinstance(value, str) and machine.holes.assume("".join(found)) is None:
            raise Undecided(machine.holes.within("".join(found))[0].why)
        if isinstance(value, Array) and not value.named and parameter.name not in "@*":
            # Bounds are those of its numbers, of which some may be missing.
            start += 1 + max(map(int, value.items), default=-1) if start < 0 else 0
            return [text for index, text in value.items.items() if int(index) >= start >= 0][:count]
        start = start + len(found) if start < 0 else start
        if not isinstance(value, str):
            return [] if start < 0 else found[start : None if count is None else start + count]
        found = value

    def cut(text: str) -> str:
        begin = start + len(text) if start < 0 else start
        if begin < 0:
            return ""
        end = len(text) if count is None else count + (len(text) if count < 0 else begin)
        return text[begin:end]

    return machine.holes.derive(f"${{{parameter.name}:{parameter.operand}}}", [found], cut)


def _bounds(text: str) -> tuple[str, str | None]:
    """Split `start:length` at the colon that is in no expansion and no `?:`."""
    index = 0
    while index < len(text):
        if text[index] == ":":
            return text[:index], text[index + 1 :]
        index = syntax.end_of(text, index)
    return text, None


def _changed(
    machine: Machine,
    parameter: ParameterExpansion,
    found: list[str] | str,
    written: str,
    operand: Callable[[str], str],
    pattern: Callable[[str], str],
) -> list[str] | str:
    sign = parameter.operation
    if sign == "@":
        raise Undecided(f"line {machine.line}: ${{…@…}} is not followed")
    by = ""
    if sign[0] == "/":
        source, by = _replacement(parameter.operand, is_open=sign == "//")
        by = operand(by)
        wanted = pattern(source)
    else:
        wanted = pattern(parameter.operand)

    def change(text: str, wanted: str, by: str) -> str:
        if sign in ("#", "##"):
            return patterns.strip_start(wanted, text, longest=sign == "##")
        if sign in ("%", "%%"):
            return patterns.strip_end(wanted, text, longest=sign == "%%")
        if sign[0] == "/":
            return patterns.replace(wanted, text, by, where=sign[1:], check=machine.budget.text)
        to = str.upper if sign[0] == "^" else str.lower
        if len(sign) == 1:
            return (
                (to(text[0]) if not wanted or patterns.matches(wanted, text[0]) else text[0]) + text[1:] if text else ""
            )
        return "".join(to(each) if not wanted or patterns.matches(wanted, each) else each for each in text)

    def derive(text: str) -> str:
        return machine.holes.derive(written, [text, wanted, by], change)

    return [derive(text) for text in found] if isinstance(found, list) else derive(found)


def _replacement(text: str, *, is_open: bool) -> tuple[str, str]:
    """Split `pattern/text`. is_open: a slash at the start belongs to the pattern, which may be empty otherwise."""
    index = 1 if is_open and text.startswith("/") else 0
    while index < len(text):
        if text[index] == "/":
            return text[:index], text[index + 1 :]
        index = syntax.end_of(text, index)
    return text, ""


def _indirect(
    machine: Machine,
    parameter: ParameterExpansion,
    written: str,
    operand: Callable[[str], str],
    pattern: Callable[[str], str],
) -> list[str] | str | None:
    if parameter.is_list and parameter.key and not parameter.operation:
        value = machine.get(parameter.name)
        return [str(key) for key in value.items] if isinstance(value, Array) else [] if value is None else ["0"]
    if parameter.operation in ("*", "@") and not parameter.operand:
        names = {name for frame in machine.state.frames for name in frame if name.startswith(parameter.name)}
        return sorted(names)
    name = _look_up(machine, parameter, operand)
    known = machine.holes.assume(name) if isinstance(name, str) else None
    found = re.fullmatch(rf"({_INDIRECT.pattern})(?:\[(.*)\])?", known or "")
    if not found:
        raise Undecided(f"line {machine.line}: the name that ${{!{parameter.name}}} stands for is not known")
    target = ParameterExpansion(
        prefix="", name=found[1], key=found[2], operation=parameter.operation, operand=parameter.operand
    )
    return parameter_values(machine, target, written, operand, pattern)
