"""How statements end early, and what statements that may or may not run can change."""

import re
from typing import TYPE_CHECKING

from megarl.migrate.shell import syntax
from megarl.migrate.shell.machine import Machine

if TYPE_CHECKING:
    from tree_sitter import Node

# Commands that can change a variable or where the script goes on.
_CHANGING = frozenset(
    [
        "set",
        "shift",
        "read",
        "mapfile",
        "readarray",
        "source",
        ".",
        "eval",
        "exec",
        "exit",
        "return",
        "break",
        "continue",
        "cd",
        "pushd",
        "popd",
        "let",
        "getopts",
        "unset",
        "export",
        "local",
        "declare",
        "typeset",
        "readonly",
        "printf",
        "shopt",
    ]
)
_ASSIGNED = re.compile(r"(?<![\w.-])([A-Za-z_]\w*)(?:\[[^\]]*\])?(?:[-+*/%&|^]|<<|>>)?=(?!=)")
_COUNTED = re.compile(r"([A-Za-z_]\w*)(?:\+\+|--)|(?:\+\+|--)([A-Za-z_]\w*)|\$\{([A-Za-z_]\w*):?=")
_READ = re.compile(r"(?:^|[\s;(|])(?:read|mapfile|readarray|let|printf\s+-v|getopts|for|select)\s+([^;|<>\n)]*)")


class Exit(Exception):  # noqa: N818 - the way a script ends
    """The script, or a subshell, ends."""

    def __init__(self, status: int | None) -> None:
        super().__init__()
        self.status = status


class Return(Exit):
    """A function or a sourced file ends."""


class Break(Exception):  # noqa: N818 - the way a loop ends
    """A loop ends, and those around it up to `levels` in all."""

    def __init__(self, levels: int) -> None:
        super().__init__()
        self.levels = levels


class Continue(Break):
    """A loop starts its next round."""


def is_inert(machine: Machine, node: "Node") -> bool:
    """Return whether statements change nothing that could matter: no variable, no way, no command that is wanted."""
    pending = [node]
    while pending:
        each = pending.pop()
        if each.type in ("variable_assignment", "declaration_command", "unset_command", "function_definition"):
            return False
        if each.type == "command":
            name = each.child_by_field_name("name")
            text = syntax.text_of(name) if name is not None else ""
            if "$" in text or text in _CHANGING or text in machine.state.functions:
                return False
        if each.type == "compound_statement" and syntax.text_of(each).startswith("(("):
            return False
        pending += each.children
    text = syntax.text_of(node)
    return not _COUNTED.search(text) and not machine.wanted(re.split(r"[\s;|&()\"'{}]+", text))


def assigned_names(text: str) -> set[str]:
    """Return the names that statements may assign, and perhaps some more."""
    names = {match[1] for match in _ASSIGNED.finditer(text)}
    names |= {name for match in _COUNTED.finditer(text) for name in match.groups() if name}
    for match in _READ.finditer(text):
        names |= set(re.findall(r"[A-Za-z_]\w*", match[1]))
    return names


def forget_assigned(machine: Machine, node: "Node") -> None:
    """Make all variables unknown that statements may assign, also through the functions that they call."""
    text, seen = syntax.text_of(node), set[str]()
    pending = [text]
    while pending:
        current = pending.pop()
        for name, (body, _) in machine.state.functions.items():
            if name not in seen and re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", current):
                seen.add(name)
                pending.append(syntax.text_of(body))
                text += "\n" + pending[-1]
    for name in sorted(assigned_names(text)):
        if name not in machine.state.read_only:
            machine.state.set(name, machine.hole(f"${name}", "set in statements that run an unknown number of times"))


def forget_set(machine: Machine, what: str) -> None:
    """Make all variables unknown that the script has set, as something may have changed them."""
    for frame in machine.state.frames:
        for name in frame:
            frame[name] = machine.hole(f"${name}", f"it may be changed by {what}")


def forget_all(machine: Machine, what: str) -> None:
    """Make all variables unknown, also those that are not set, as statements that cannot be read may set them."""
    forget_set(machine, what)
    machine.open = what
