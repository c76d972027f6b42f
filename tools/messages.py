"""Find the messages that users see in the code, and print them: `python -m tools.messages`."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
ERRORS = {
    "DataError",
    "EngineDiedError",
    "LostError",
    "MismatchError",
    "NonFiniteError",
    "RunError",
    "RunStopped",
    "StorageError",
    "WeightSyncError",
    "WorkerError",
}
# Other errors of settings name their key and explain themselves. Files are read with an error of the caller's choice.
EXPLAINED = (
    "migrate/convert_config.py",
    "migrate/peer_",
    "migrate/launch_script.py",
    "host/",
    "megarl_sandbox/process.py",
)
# Functions that return warnings under other names.
WARNERS = re.compile("warn|^_lost_rows$|^_dropped_pairs$")
# Stands for what varies in a message.
GAP = "\0"
# Less text than this tells no message from others.
LEAST = 10
_HEADER = """# Every message

These are the errors and warnings of a run and the advice of
`megarl doctor`, by the package that gives them; `…` stands for what varies. Errors of settings are not listed: they
begin with the name of the setting and end with the remedy. [failures.md](failures.md) explains the
messages whose cause or remedy needs more words.
"""


class FoundMessage(NamedTuple):
    """A message with its place, `module:line`; advice: it is a remedy and nothing else."""

    place: str
    text: str
    advice: bool = False

    @property
    def explains_itself(self) -> bool:
        """Messages say what was found, then what was expected, then after a semicolon what to do."""
        return self.advice or "; " in self.text or "expected" in self.text


def texts(node: ast.expr | None, names: dict[str, list[ast.expr]]) -> Iterator[str]:
    """Yield the texts that an expression may be, with a gap for each value; names: what each name is assigned."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr(values=parts):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else GAP for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            sides = [[*texts(side, names)] or [GAP] for side in (left, right)]
            yield from (a + b for a in sides[0] for b in sides[1])
        case ast.BoolOp(values=values):
            yield from (text for value in values for text in texts(value, names))
        case ast.IfExp(body=body, orelse=orelse):
            yield from (*texts(body, names), *texts(orelse, names))
        case ast.Name(id=name):
            yield from (text for value in names.get(name, ()) for text in texts(value, {}))


class MessageCollector(ast.NodeVisitor):
    """Collects the messages of a module."""

    def __init__(self, place: str, tree: ast.Module) -> None:
        self.place, self.found = place, list[FoundMessage]()
        self.errors = ERRORS | ({"ConfigError", "OptionError", "error"} if place.startswith(EXPLAINED) else set())
        self.names: dict[str, list[ast.expr]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self.names.setdefault(node.targets[0].id, []).append(node.value)
        self.visit(tree)

    def add(self, node: ast.expr | None, *, advice: bool = False) -> None:
        place = f"{self.place}:{node.lineno}" if node else self.place
        self.found += [FoundMessage(place, " ".join(text.split()), advice) for text in texts(node, self.names)]

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if WARNERS.search(node.name) or self.place == "host/reading.py":
            for inner in ast.walk(node):
                if isinstance(inner, ast.Return | ast.Yield):
                    self.add(inner.value)
                for key in inner.keys if isinstance(inner, ast.Dict) else ():
                    self.add(key)
                if isinstance(inner, ast.Call) and getattr(inner.func, "attr", "") == "append":
                    self.add(inner.args[0])
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        if any(isinstance(base, ast.Name) and base.id in self.errors for base in node.bases):
            self.errors |= {node.name, "__init__"}
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        if node.args and (name in self.errors or name == "warn"):
            self.add(node.args[0])
        elif node.args:
            said = [text for text in texts(node.args[0], {}) if text.startswith("warning: ")]
            self.found += [FoundMessage(f"{self.place}:{node.lineno}", " ".join(text.split())) for text in said]
        for keyword in node.keywords:
            if (name, keyword.arg) in {("Finding", "advice"), ("Cause", "remedy")}:
                self.add(keyword.value, advice=True)
        self.generic_visit(node)


@cache
def sources() -> dict[str, str]:
    """Return the text of each module, by its path below megarl, or else below the repository."""
    paths = [
        path
        for package in ("megarl", "megarl_answers", "megarl_lab", "megarl_sandbox")
        for path in sorted((ROOT / package).rglob("*.py"))
    ]
    texts = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    return {place.removeprefix("megarl/"): text for place, text in texts.items()}


@cache
def messages() -> tuple[FoundMessage, ...]:
    """Return all messages with enough text to be told from others, in the order of modules and lines."""
    told = re.compile(rf"({'|'.join(ERRORS)}|Finding|Cause)\(|warn")
    chosen = [(place, text) for place, text in sources().items() if place.startswith(EXPLAINED) or told.search(text)]
    found = [message for place, text in chosen for message in MessageCollector(place, ast.parse(text)).found]
    return tuple(message for message in found if telling(message.text, GAP) >= LEAST)


def telling(text: str, gap: str) -> int:
    """Return the length of the longest piece between gaps, without the words that most messages have."""
    return max(len(re.sub(r"\b(got|expected|is|has)\b", "", piece).strip(" :;,()")) for piece in text.split(gap))


def render() -> str:
    """Return the text of the page messages.md of the site."""
    parts = [_HEADER]
    for package, group in groupby(messages(), key=lambda message: message.place.partition("/")[0]):
        rows = [(message.text, message.place.rpartition(":")[0]) for message in group]
        lines = [f"| {_code(text)} | `{place}` |" for text, place in dict.fromkeys(rows)]
        parts.append("\n".join([f"## {package}", "", "| message | from |", "|---|---|", *lines, ""]))
    return "\n".join(parts)


def _code(text: str) -> str:
    shown = re.sub(r"\{[a-z]+\}", "…", text.replace(GAP, "…")).replace("|", "\\|")
    return f"`` {shown} ``" if "`" in shown else f"`{shown}`"


if __name__ == "__main__":
    print(render())
