"""The commands that read what is given to them: `read`, `mapfile`, `cat`."""

import re
from collections.abc import Callable, Mapping

from megarl.migrate.shell.machine import Machine
from megarl.migrate.shell.state import Array


def _options(words: list[str], with_value: str) -> tuple[dict[str, str], list[str]]:
    """Return the options of a command by letter, and its other words."""
    options: dict[str, str] = {}
    index = 0
    while index < len(words) and re.fullmatch(r"-[A-Za-z]+.*", words[index], re.DOTALL):
        letters = words[index][1:]
        index += 1
        while letters:
            letter, letters = letters[0], letters[1:]
            options[letter] = ""
            if letter in with_value:
                if not letters and index < len(words):
                    letters, index = words[index], index + 1
                options[letter], letters = letters, ""
    return options, words[index:]


def _read(machine: Machine, words: list[str]) -> int | None:
    options, names = _options(words, "adipntNu")
    names = names or ["REPLY"]
    text = machine.stdin
    if text is None or set("nNtu") & set(options):
        for name in [options["a"]] if "a" in options else names:
            machine.assign(name, machine.hole(f"${name}", "it is read from a file or a terminal"))
        return None
    is_assumed = machine.holes.assume(text) not in (None, text)
    text = machine.holes.assume(text) or text
    delimiter = (options["d"] or "\0")[0] if "d" in options else "\n"
    index = 0
    taken = ""
    while index < len(text) and text[index] != delimiter:
        if "r" not in options and text[index] == "\\":
            index += 1
            taken += "" if text[index : index + 1] == "\n" else text[index : index + 1]
        else:
            taken += text[index]
        index += 1
    status = 0 if index < len(text) else 1
    machine.stdin = text[index + 1 :]
    separators = machine.state.get("IFS")
    known = separators if isinstance(separators, str) else " \t\n"
    blank = "".join(each for each in known if each in " \t\n")
    taken = taken.strip(blank) if blank else taken
    if "a" in options:
        parts = re.split(f"[{re.escape(known)}]+", taken) if known and taken else [taken] if taken else []
        machine.assign(options["a"], Array(dict(enumerate(parts))))
        return status

    def give(name: str, value: str) -> None:
        reason = "it is read from text with variables that the script does not set"
        machine.assign(name, machine.hole(f"${name}", reason, value) if is_assumed else value)

    for name in names[:-1]:
        found = (
            re.search(f"[{re.escape(blank)}]+" if blank == known else f"[{re.escape(known)}]", taken) if known else None
        )
        first, taken = (taken[: found.start()], taken[found.end() :]) if found else (taken, "")
        give(name, first)
    give(names[-1], taken)
    return status


def _mapfile(machine: Machine, words: list[str]) -> int | None:
    options, names = _options(words, "dnOsuCc")
    name = names[0] if names else "MAPFILE"
    if machine.stdin is None or set(options) - {"t"}:
        machine.assign(name, machine.hole(f"${name}", "it is read from a file or a command"))
        return None
    lines = machine.stdin.splitlines(keepends="t" not in options)
    machine.assign(name, Array(dict(enumerate(lines))))
    return 0


def _cat(machine: Machine, words: list[str]) -> int | None:
    machine.print(None if words else machine.stdin)
    return None if words else 0


READING: Mapping[str, Callable[[Machine, list[str]], int | None]] = {
    "read": _read,
    "mapfile": _mapfile,
    "readarray": _mapfile,
    "cat": _cat,
    "tee": lambda machine, words: machine.print(machine.stdin),
}
