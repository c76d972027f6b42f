"""The variables, functions and options of a shell, and the limits on what a script may use up."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from tree_sitter import Node

# The most of each that a script may use. The longest text is that of an argument on Linux.
MAX_STEPS = 100_000
MAX_TEXT = 131_072
MAX_TOTAL = 64 * 1024 * 1024
MAX_WORDS = 300_000
MAX_DEPTH = 40


class ShellLimitError(ValueError):
    """A script asks for more work or memory than a limit allows; the message names the limit."""


@dataclass(slots=True)
class Budget:
    """The part of the limits that a script has used, in all worlds together."""

    steps: int = 0
    characters: int = 0
    words: int = 0

    def step(self) -> None:
        """Count one statement or one look-up."""
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise ShellLimitError(f"more than {MAX_STEPS} steps")

    def word(self) -> None:
        """Count a word, or a part of one, that an expansion makes."""
        self.words += 1
        if self.words > MAX_WORDS:
            raise ShellLimitError(f"more than {MAX_WORDS} words in all")

    def text(self, length: int) -> None:
        """Count the characters of a new text."""
        self.characters += length
        if length > MAX_TEXT:
            raise ShellLimitError(f"a text of more than {MAX_TEXT} characters")
        if self.characters > MAX_TOTAL:
            raise ShellLimitError(f"more than {MAX_TOTAL} characters of text in all")


@dataclass(frozen=True, slots=True)
class Array:
    """An array; the keys of one that is not associative are numbers, in order. It is replaced, never changed."""

    items: Mapping[int | str, str]
    named: bool = False

    def with_item(self, key: int | str, text: str) -> "Array":
        """Return the array with one element set."""
        items = {**self.items, key: text}
        return Array(items if self.named else dict(sorted(items.items(), key=lambda item: int(item[0]))), self.named)


Value: TypeAlias = str | Array


@dataclass(slots=True, kw_only=True)
class State:
    """The state of a shell, of which a subshell gets a copy.

    frames: variables, the script's own first, then one for each function that runs; None is a local name that is not
    set. functions: each with the line where its text starts. arguments: `$1` and those after it, of the script and of
    each function. typed: names whose value is changed as it is assigned (`declare -i`). directory: where commands run,
    None if that is not known. zero, file: what `$0` and BASH_SOURCE say.
    """

    frames: list[dict[str, Value | None]] = field(default_factory=lambda: [{}])
    arguments: list[list[str]] = field(default_factory=lambda: [[]])
    functions: dict[str, tuple["Node", int]] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    typed: set[str] = field(default_factory=set)
    read_only: set[str] = field(default_factory=set)
    options: set[str] = field(default_factory=set)
    status: int | None = 0
    directory: str | None = None
    zero: str = ""
    file: str = ""

    def copy(self) -> "State":
        """Return a state of its own for a subshell."""
        return replace(
            self,
            frames=[dict(frame) for frame in self.frames],
            arguments=[list(each) for each in self.arguments],
            functions=dict(self.functions),
            exported=set(self.exported),
            typed=set(self.typed),
            read_only=set(self.read_only),
            options=set(self.options),
        )

    def holder(self, name: str) -> dict[str, Value | None]:
        """Return the frame that has a variable: that of the innermost function, or else the script's own."""
        return next((frame for frame in reversed(self.frames) if name in frame), self.frames[0])

    def get(self, name: str) -> Value | None:
        """Return the value of a variable, or None if it is not set."""
        return self.holder(name).get(name)

    def set(self, name: str, value: Value | None) -> None:
        """Set a variable where it is visible."""
        holder = self.holder(name)
        if value is None and holder is self.frames[0]:
            holder.pop(name, None)
        else:
            holder[name] = value
