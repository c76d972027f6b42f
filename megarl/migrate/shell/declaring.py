"""Follow `export`, `local`, `declare`, `typeset` and `readonly`."""

from collections.abc import Callable

from megarl.migrate.shell import syntax
from megarl.migrate.shell.machine import Machine, Undecided
from megarl.migrate.shell.state import Array
from megarl.migrate.shell.words import expand_words

DECLARING = frozenset(("export", "local", "declare", "typeset", "readonly"))


def declare(machine: Machine, kind: str, words: list[tuple[str, int]], line: int, assign: Callable[[str], None]) -> int:
    """Run a declaration; `assign` follows one of its assignments."""
    options = "".join(word[1:] for word, _ in words if word.startswith("-"))
    is_local = kind != "export" and kind != "readonly" and len(machine.state.frames) > 1 and "g" not in options
    if set("fFp") & set(options):
        return 0
    if "n" in options and kind != "export":
        raise Undecided(f"line {line}: {kind} -n gives a variable another name")
    for word, lines in words:
        machine.line = line + lines
        if word.startswith(("-", "+")):
            continue
        given = (
            [word]
            if syntax.assignment(word)
            else [text for text, _ in expand_words(machine, [(word, 0)], machine.line)]
        )
        for each in given:
            parts = syntax.assignment(each)
            name = parts.name if parts else each
            if is_local and name not in machine.state.frames[-1]:
                machine.state.frames[-1][name] = None
            machine.state.typed.discard(name) if is_local else None
            if "A" in options and not isinstance(machine.state.get(name), Array):
                machine.state.set(name, Array({}, named=True))
            elif "a" in options and machine.state.get(name) is None:
                machine.state.set(name, Array({}))
            if set("iluc") & set(options):
                machine.state.typed.add(name)
            if parts and each is word:
                assign(each)
            elif parts:
                machine.assign(name, parts.text, append=parts.appends)
            if kind == "export" or "x" in options:
                machine.state.exported.add(name)
            if kind == "readonly" or "r" in options:
                machine.state.read_only.add(name)
    return 0
