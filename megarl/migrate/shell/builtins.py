"""The commands of the shell itself, and those few others whose output follows from their arguments."""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

from megarl.migrate.shell.flow import Break, Continue, Exit, Return, forget_all, forget_set
from megarl.migrate.shell.machine import Machine, Undecided
from megarl.migrate.shell.reading import READING
from megarl.migrate.shell.state import MAX_TEXT, ShellLimitError
from megarl.migrate.shell.words import unescape

Builtin: TypeAlias = Callable[[Machine, list[str]], int | None]
# Files and commands that set up the machine's own environment.
_SETUP = re.compile(
    r"(.*/)?(activate|conda\.sh|mamba\.sh|\.?(bash|zsh)(rc|_profile)|\.?profile|setvars\.sh|modules\.sh|bash\.sh|init/\w+)"
    r"|.*\b(conda|mamba|micromamba|pyenv|direnv|ssh-agent|modulecmd)\b.*"
)
_LETTERS = {"e": "e", "u": "u", "f": "f", "a": "a", "errexit": "e", "nounset": "u", "noglob": "f", "allexport": "a"}


def _status(status: int | None) -> Builtin:
    return lambda machine, words: status


def _echo(machine: Machine, words: list[str]) -> int:
    ends, escapes = "\n", False
    while words and re.fullmatch(r"-[neE]+", words[0]):
        ends = "" if "n" in words[0] else ends
        escapes = words[0].rfind("e") > words[0].rfind("E") if set("eE") & set(words[0]) else escapes
        words = words[1:]
    text = " ".join(words)
    machine.print((unescape(text) if escapes else text) + ends)
    return 0


def _printf(machine: Machine, words: list[str]) -> int:
    name = None
    if words[:1] == ["-v"] and len(words) > 2:
        name, words = words[1], words[2:]
    if words[:1] == ["--"]:
        words = words[1:]
    text = _formatted(machine, words) if words else ""
    if name is None:
        machine.print(text)
    else:
        machine.assign(name, machine.hole(f"${name}", "printf with an unusual format") if text is None else text)
    return 0


def _formatted(machine: Machine, words: list[str]) -> str | None:
    """Return what `printf` prints, None for formats beyond %s and %d."""
    parts = re.findall(r"%(?:0?\d{0,3}[sd]|%)|[^%]+|%", words[0])
    if "%" in parts or machine.holes.within(words[0]):
        return None
    arguments, printed = words[1:], ""
    while True:
        left = len(arguments)
        for part in parts:
            if part[0] != "%":
                printed += unescape(part)
            elif part == "%%":
                printed += "%"
            else:
                value = arguments.pop(0) if arguments else ""
                if part[-1] == "s":
                    printed += value.rjust(int(part[1:-1] or 0))
                elif re.fullmatch(r"-?(0|[1-9]\d{0,17})?", value):
                    printed += f"{int(value or 0):{part[1:]}}"
                else:
                    return None
        if len(printed) > MAX_TEXT:
            raise ShellLimitError(f"a text of more than {MAX_TEXT} characters")
        if not arguments or len(arguments) == left:
            return printed


def _of_path(change: Callable[[str], str]) -> Builtin:
    """Return a command that prints what becomes of each path."""

    def run(machine: Machine, words: list[str]) -> int | None:
        paths = [word for word in words if not word.startswith("-")]
        options = [word for word in words if word.startswith("-") and word not in ("-f", "-e", "-m", "--")]
        if options or not paths:
            machine.print(None)
            return None
        machine.print("".join(machine.holes.derive(f"$({path})", [path], change) + "\n" for path in paths))
        return 0

    return run


def _basename(machine: Machine, words: list[str]) -> int | None:
    words = words[1:] if words[:1] == ["--"] else words
    if not 1 <= len(words) <= 2 or words[0].startswith("-"):
        machine.print(None)
        return None

    def base(path: str) -> str:
        name = path.rstrip("/").rpartition("/")[2] or path[:1]
        suffix = words[1] if len(words) == 2 else ""
        return name.removesuffix(suffix) if name != suffix else name

    machine.print(machine.holes.derive(f"$(basename {machine.holes.show(words[0])})", [words[0]], base) + "\n")
    return 0


def _dirname(path: str) -> str:
    head, slash, _ = path.rstrip("/").rpartition("/")
    return head.rstrip("/") or (slash or ".") if path.strip("/") else (path[:1] or ".")


def _real(machine: Machine, words: list[str]) -> int | None:
    paths = [word for word in words if word not in ("-f", "-e", "-m", "--")]
    known = machine.holes.assume(paths[0]) if len(paths) == 1 and not paths[0].startswith("-") else None
    if known is None or not (known.startswith("/") or machine.state.directory):
        machine.print(None)
        return None
    machine.print(os.path.realpath(os.path.join(machine.state.directory or "/", known)) + "\n")
    return 0


def _pwd(machine: Machine, words: list[str]) -> int | None:
    machine.print(machine.directory() + "\n" if machine.state.directory else None)
    return 0


def _cd(machine: Machine, words: list[str]) -> int:
    target = next((word for word in words if not re.fullmatch(r"-[LPe]+|--", word)), str(machine.get("HOME")))
    known = machine.holes.assume(target)
    if known is None or target == "-" or not (known.startswith("/") or machine.state.directory):
        machine.state.directory = None
    elif known:
        machine.state.directory = os.path.normpath(os.path.join(machine.state.directory or "/", known))
    return 0


def _seq(machine: Machine, words: list[str]) -> int | None:
    if not 1 <= len(words) <= 3 or not all(re.fullmatch(r"-?\d{1,9}", word) for word in words):
        machine.print(None)
        return None
    numbers = [int(word) for word in words]
    first, step, last = numbers[0] if len(numbers) > 1 else 1, numbers[1] if len(numbers) == 3 else 1, numbers[-1]
    if step == 0 or abs(last - first) // abs(step) > MAX_TEXT:
        raise ShellLimitError(f"a text of more than {MAX_TEXT} characters")
    machine.print("".join(f"{n}\n" for n in range(first, last + (1 if step > 0 else -1), step)))
    return 0


def _set(machine: Machine, words: list[str]) -> int:
    index = 0
    while index < len(words) and re.fullmatch(r"[-+][A-Za-z]+", words[index]):
        change = machine.state.options.add if words[index][0] == "-" else machine.state.options.discard
        letters = list(words[index][1:])
        if letters[-1] == "o":
            index += 1
            letters[-1:] = [words[index]] if index < len(words) else []
        for letter in letters:
            change(_LETTERS.get(letter, letter))
        index += 1
    if words[index : index + 1] == ["--"]:
        machine.state.arguments[-1] = words[index + 1 :]
    elif index < len(words):
        machine.state.arguments[-1] = words[index:]
    return 0


def _shift(machine: Machine, words: list[str]) -> int:
    count = int(words[0][:9]) if words and words[0].isdigit() else 1
    if count > len(machine.state.arguments[-1]):
        return 1
    del machine.state.arguments[-1][:count]
    return 0


def _unset(machine: Machine, words: list[str]) -> int:
    for word in words:
        if machine.holes.assume(word) is None:
            forget_set(machine, f"`unset` in line {machine.line}")
            continue
        name, _, key = word.partition("[")
        value = machine.state.get(name)
        if word == "-f" or name in machine.state.read_only:
            continue
        if key and value is not None and not isinstance(value, str):
            index = key[:-1] if value.named else machine.index(key[:-1], value)
            items = {each: text for each, text in value.items.items() if each != index}
            machine.state.set(name, type(value)(items, value.named))
        elif not word.startswith("-"):
            machine.state.set(name, None)
            machine.state.exported.discard(name)
    return 0


def _let(machine: Machine, words: list[str]) -> int | None:
    try:
        results = [machine.calculate(word) for word in words]
    except Undecided as undecided:
        if "bash refuses" not in undecided.why:
            forget_all(machine, f"let in line {machine.line}")
            return None
        return 1
    return int(not results or results[-1] == 0)


def _leave(kind: type[Exit]) -> Builtin:
    def run(machine: Machine, words: list[str]) -> int | None:
        known = machine.holes.assume(words[0]) if words else None
        status = (
            machine.state.status
            if not words
            else int(known) & 255
            if known and re.fullmatch(r"-?\d{1,9}", known)
            else None
        )
        if kind is Exit:
            machine.ended = f"line {machine.line}: exit"
        raise kind(status)

    return run


def _jump(kind: type[Break]) -> Builtin:
    def run(machine: Machine, words: list[str]) -> int | None:
        raise kind(int(words[0][:3]) if words and words[0].isdigit() else 1)

    return run


def _eval(machine: Machine, words: list[str]) -> int | None:
    text = " ".join(words)
    command = text.lstrip().partition(" ")[0]
    if machine.holes.assume(command) is None:
        return _unreadable(machine, f"eval {machine.holes.show(text)[:60]}")
    return machine.interpret(machine, text, machine.line)


def _source(machine: Machine, words: list[str]) -> int | None:
    name = machine.holes.assume(words[0]) if words else ""
    shown = f"source {machine.holes.show(words[0])}" if words else "source"
    if name is None or _SETUP.fullmatch(name) or not (name.startswith("/") or machine.state.directory):
        return _unreadable(machine, shown)
    path = Path(machine.state.directory or "/") / name
    source = read_local(path)
    if source is None:
        return _unreadable(machine, shown)
    state, line, arguments, file = machine.state, machine.line, machine.state.arguments[-1], machine.state.file
    state.file = str(path)
    if len(words) > 1:
        machine.state.arguments[-1] = words[1:]
    try:
        return machine.interpret(machine, source, 1)
    except Return as end:
        return end.status
    finally:
        machine.line, state.file = line, file
        if len(words) > 1:
            machine.state.arguments[-1] = arguments


def read_local(path: Path) -> str | None:
    """Return the text of a script that another one runs, None if there is none that can be read."""
    try:
        if not path.is_file() or path.stat().st_size > MAX_TEXT:
            return None
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _unreadable(machine: Machine, what: str) -> int | None:
    """Go on after something whose statements cannot be read."""
    if _SETUP.fullmatch(what.partition(" ")[2].strip("\"'$()")):
        machine.assumptions[f"`{what}` (line {machine.line}) sets no variable that the script reads."] = None
        return 0
    forget_all(machine, f"`{what}` (line {machine.line}), which cannot be read here")
    return None


def _getopts(machine: Machine, words: list[str]) -> int | None:
    if not machine.state.arguments[-1]:
        return 1
    forget_all(machine, f"getopts in line {machine.line}")
    return None


BUILTINS: Mapping[str, Builtin] = {
    **dict.fromkeys((":", "true", "trap", "sleep", "umask", "ulimit", "hash", "shopt", "disown"), _status(0)),
    "false": _status(1),
    "wait": _status(None),
    "echo": _echo,
    "printf": _printf,
    "basename": _basename,
    "dirname": _of_path(_dirname),
    "realpath": _real,
    "readlink": _real,
    "pwd": _pwd,
    "cd": _cd,
    "pushd": _cd,
    "popd": lambda machine, words: _cd(machine, ["-"]),
    "seq": _seq,
    "set": _set,
    "shift": _shift,
    "unset": _unset,
    "let": _let,
    "exit": _leave(Exit),
    "return": _leave(Return),
    "break": _jump(Break),
    "continue": _jump(Continue),
    "eval": _eval,
    "source": _source,
    ".": _source,
    "getopts": _getopts,
    **READING,
}
