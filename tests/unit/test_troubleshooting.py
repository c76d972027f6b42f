"""docs/troubleshooting.md has an entry for every message that users see, and no entry for one that does not exist."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
ERRORS = {
    "DataError",
    "EngineDiedError",
    "MismatchError",
    "NonFiniteError",
    "RunError",
    "RunStopped",
    "StorageError",
    "WeightSyncError",
    "WorkerError",
}
# Other errors of settings name their key and explain themselves. Files are read with an error of the caller's choice.
EXPLAINED = ("migrate/convert_config.py", "migrate/peer_", "migrate/shell/", "host/", "sandbox/process.py")
# Functions that return warnings under other names.
WARNERS = re.compile("warn|^_lost_rows$|^_dropped_pairs$")
# Stands for what varies in a message.
GAP = "\0"
# Less text than this tells no message from others.
LEAST = 10

Message = tuple[str, str]


def texts(node: ast.expr | None, names: dict[str, list[ast.expr]]) -> Iterator[str]:
    """The texts that an expression may be, with a gap for each value; names: what each name is assigned."""
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


class Messages(ast.NodeVisitor):
    """Collects the messages of a module, each with its place."""

    def __init__(self, place: str, tree: ast.Module) -> None:
        self.place, self.found = place, list[Message]()
        self.errors = ERRORS | ({"ConfigError", "error"} if place.startswith(EXPLAINED) else set())
        self.names: dict[str, list[ast.expr]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self.names.setdefault(node.targets[0].id, []).append(node.value)
        self.visit(tree)

    def add(self, node: ast.expr | None) -> None:
        self.found += [(f"{self.place}:{node.lineno}", text) for text in texts(node, self.names) if node]

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if WARNERS.search(node.name) or self.place == "storage/reading.py":
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
            self.found += [(f"{self.place}:{node.lineno}", text) for text in said]
        for keyword in node.keywords:
            if (name, keyword.arg) in {("Finding", "advice"), ("Cause", "remedy")}:
                self.add(keyword.value)
        self.generic_visit(node)


@cache
def sources() -> dict[str, str]:
    root = ROOT / "megarl"
    return {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in root.rglob("*.py")}


@cache
def messages() -> tuple[Message, ...]:
    told = re.compile(rf"({'|'.join(ERRORS)}|Finding|Cause)\(|warn")
    chosen = [(place, text) for place, text in sources().items() if place.startswith(EXPLAINED) or told.search(text)]
    found = [Messages(place, ast.parse(text)).found for place, text in chosen]
    return tuple((place, " ".join(text.split())) for each in found for place, text in each)


@cache
def entries() -> tuple[str, ...]:
    """What the page quotes in the first column of its tables; `…` stands for what varies."""
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return tuple(quoted for row in rows for quoted in re.findall(r"`([^`]+)`", row.split(" | ")[0]))


def quotes(entry: str, text: str) -> bool:
    """Whether the pieces of an entry stand in a text, in their order."""
    start = 0
    for piece in entry.split("…"):
        if (found := text.find(piece, start)) < 0:
            return False
        start = found + len(piece)
    return True


def telling(text: str, gap: str) -> int:
    """The length of the longest piece, without the words that most messages have."""
    return max(len(re.sub(r"\b(got|expected|is|has)\b", "", piece).strip(" :;,()")) for piece in text.split(gap))


def test_every_message_has_an_entry() -> None:
    specific = [entry for entry in entries() if telling(entry, "…") >= LEAST]
    assert len(messages()) > 250
    missing = [
        f"{place}: {text.replace(GAP, '…')}"
        for place, text in messages()
        if telling(text, GAP) >= LEAST and not any(quotes(entry, text) for entry in specific)
    ]
    assert not missing, f"{PAGE.name} has no entry for:\n" + "\n".join(missing)


def test_every_entry_is_of_a_message() -> None:
    """Each piece of it stands in the code, where a text may be written in several parts."""
    code = re.sub(r'"\s*\n\s*f?"', "", "\n".join(sources().values()))
    code = code.replace("{{", "{").replace("}}", "}")
    stale = [entry for entry in entries() if not all(piece in code for piece in entry.split("…"))]
    assert not stale, f"{PAGE.name} quotes what no message says:\n" + "\n".join(stale)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ('raise DataError(f"{a}: is {b!r}, " "expected {c}")', "\0: is \0, expected {c}"),
        ('raise WorkerError(instead(x) or f"row {i}")', "row \0"),
        ('m = f"cannot {a}"\nraise RunError(m)', "cannot \0"),
        ('raise StorageError("one" if x else "two")', "one two"),
        ('raise RunError(where + ": no rows")', "\0: no rows"),
        ('print(f"warning: {a}", flush=True)', "warning: \0"),
        ('class Own(DataError): pass\nraise Own("of a subclass")', "of a subclass"),
        ('raise ConfigError("a.b: got 1, expected 2")', ""),
    ],
)
def test_messages_are_found_in_code(code: str, expected: str) -> None:
    assert " ".join(text for _, text in Messages("data/files.py", ast.parse(code)).found) == expected
