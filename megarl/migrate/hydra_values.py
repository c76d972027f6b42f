"""Read the values of Hydra's arguments, by Hydra's grammar (its `OverrideLexer` and `OverrideParser`)."""

import re
from typing import NoReturn

from megarl.errors import ConfigError

_DIGITS = r"(?:0|[1-9](?:_?\d)*)"
_POINT = rf"(?:{_DIGITS}\.|{_DIGITS}?\.\d(?:_?\d)*)"
_INT = re.compile(rf"[+-]?{_DIGITS}", re.ASCII)
_FLOAT = re.compile(rf"[+-]?(?:{_POINT}|(?:{_POINT}|{_DIGITS})[eE][+-]?\d(?:_?\d)*|(?i:inf|nan))", re.ASCII)
_WORDS = {"true": True, "false": False, "null": None}
_QUOTED = re.compile(r"""(['"])((?:\\\\)*|.*?[^\\](?:\\\\)*)\1""", re.DOTALL)
_ESCAPED = r"\\[\\()\[\]{}:=, \t]"
_PLAIN = re.compile(rf"(?:{_ESCAPED}|\$\{{[^}}]+\}}|[\w \t/\\+.$%*@?|:-])+", re.ASCII)
_PLAIN_KEY = re.compile(rf"(?:{_ESCAPED}|[\w \t/\\+.$%*@?|-])+", re.ASCII)
_CALL = re.compile(r"([A-Za-z_][\w-]*)[ \t]*\(", re.ASCII)


def option_value(text: str) -> object:
    """Read what follows the equals sign; raise ConfigError if Hydra refuses it, or takes it for several runs."""
    reader = _Reader(text)
    reader.skip()
    if reader.at == len(text):
        return ""
    value = reader.element()
    if reader.takes(","):
        reader.refuse("it is a sweep over several runs; choose one of the values")
    if reader.at < len(text):
        reader.refuse(f"it cannot read {text[reader.at :]!r}")
    return value


class _Reader:
    """A position in a value."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def refuse(self, why: str) -> NoReturn:
        raise ConfigError(f"Hydra refuses {self.text!r}: {why}")

    def skip(self) -> None:
        while self.text[self.at : self.at + 1] in (" ", "\t"):
            self.at += 1

    def takes(self, mark: str) -> bool:
        """Step over a mark and the white space around it, if it is next."""
        start = self.at
        self.skip()
        if not self.text.startswith(mark, self.at):
            self.at = start
            return False
        self.at += 1
        if mark not in "]})":
            self.skip()
        return True

    def element(self) -> object:
        """Read a list, a mapping, a quoted text or a plain one."""
        if quoted := _QUOTED.match(self.text, self.at):
            self.at = quoted.end()
            # Backslashes count only before the quote.
            return re.sub(rf"(\\+)({quoted[1]}|$)", lambda run: "\\" * (len(run[1]) // 2) + run[2], quoted[2])
        if self.takes("["):
            items: list[object] = []
            while not self.takes("]"):
                self.separate(bool(items))
                items.append(self.element())
            return items
        if self.takes("{"):
            pairs: dict[object, object] = {}
            while not self.takes("}"):
                self.separate(bool(pairs))
                key = self.plain(_PLAIN_KEY)
                if not self.takes(":"):
                    self.refuse(f"no colon follows the key {key!r}")
                pairs[key] = self.element()
            return pairs
        if call := _CALL.match(self.text, self.at):
            raise ConfigError(f"{self.text!r}: {call[1]}(…) would make the value; write the value itself")
        return self.plain(_PLAIN)

    def separate(self, has_items: bool) -> None:
        if has_items and not self.takes(","):
            self.refuse(f"no comma is before {self.text[self.at :]!r}")

    def plain(self, pattern: re.Pattern[str]) -> bool | float | str | None:
        """Read a number, true, false or null, or any other text without quotes."""
        match = pattern.match(self.text, self.at)
        if match is None:
            self.refuse(f"it cannot read {self.text[self.at :]!r}")
        self.at = match.end()
        # An escaped blank at the end belongs to the text.
        raw = re.fullmatch(rf"((?:{_ESCAPED}|.)*?)[ \t]*", match[0], re.DOTALL)
        text = raw[1] if raw else match[0]
        if text.lower() in _WORDS:
            return _WORDS[text.lower()]
        if _INT.fullmatch(text):
            return int(text)
        if _FLOAT.fullmatch(text):
            return float(text)
        parts = re.split(r"(\$\{[^}]+\})", text)
        return "".join(
            part if number % 2 else re.sub(rf"(?:{_ESCAPED})", lambda run: run[0][1], part)
            for number, part in enumerate(parts)
        )
