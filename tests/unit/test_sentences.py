"""Pages, docstrings and comments have no statement that begins with "Of …," or "What …": its subject comes too late."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.syntax import nodes_of

ROOT = Path(__file__).parents[2]
PAGES = (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")))
MODULES = [
    path
    for package in ("megarl", "megarl_answers", "megarl_lab", "megarl_sandbox", "tools")
    for path in sorted((ROOT / package).rglob("*.py"))
]
SENTENCE = re.compile(r"\S.*?(?:[.!?](?=\s|\Z)|\Z)", re.DOTALL)
LATE = re.compile(r"[*\[(]*(?:Of (?!course\b)[^,;:]*,|What\b.*[.]\Z)", re.DOTALL)
# These begin a part of their own within a paragraph.
ITEM = re.compile(r"\s*(?:[-*]|\d+\.) +")


def late_sentences(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line within a text, from 0, and the beginning of each sentence in the wrong order."""
    for sentence in SENTENCE.finditer(text):
        if LATE.match(sentence[0]):
            yield text.count("\n", 0, sentence.start()), " ".join(sentence[0].split())[:60]


def parts(page: str) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs, list items and table cells of a page with their lines, from 1; no code and no headings."""
    fenced, part = False, list[str]()
    for number, line in enumerate([*page.splitlines(), ""], start=1):
        fenced ^= line.startswith("```")
        skipped = fenced or line.startswith(("```", "#", "    "))
        if part and (skipped or not line.strip() or line.startswith("|") or ITEM.match(line)):
            yield number - len(part), "\n".join(part)
            part = []
        if line.startswith("|") and not skipped:
            yield from ((number, cell) for cell in line.strip("| ").split(" | "))
        elif line.strip() and not skipped:
            part.append(ITEM.sub("", line))


def docstrings(module: str) -> Iterator[tuple[int, str]]:
    """Yield the docstrings of a module with their lines."""
    for node in nodes_of(module):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            match node.body:
                case [ast.Expr(value=ast.Constant(value=str(text), lineno=line)), *_]:
                    yield line, text


def comments(module: str) -> Iterator[tuple[int, str]]:
    """Yield the comments of a module with their lines, neighbouring lines as one."""
    block = list[tokenize.TokenInfo]()
    for token in [*tokenize.generate_tokens(io.StringIO(module).readline), None]:
        if (
            token is not None
            and token.type == tokenize.COMMENT
            and (not block or token.start[0] == block[-1].start[0] + 1)
        ):
            block.append(token)
        elif block and (token is None or token.type == tokenize.COMMENT):
            yield block[0].start[0], "\n".join(each.string.lstrip("# ") for each in block)
            block = [] if token is None else [token]


def hits(path: Path) -> list[str]:
    """List the sentences in the wrong order of a page or a module, each with its place."""
    text = path.read_text(encoding="utf-8")
    return [
        f"{path.relative_to(ROOT)}:{first + line}: {sentence}"
        for first, part in ((*docstrings(text), *comments(text)) if path.suffix == ".py" else parts(text))
        for line, sentence in late_sentences(part)
    ]


def test_sentences_begin_with_their_subject_or_verb() -> None:
    found = [hit for path in (*PAGES, *MODULES) for hit in hits(path)]
    assert not found, f"{len(found)} sentences in the wrong order:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("Of an engine that died before, nothing comes.", [0]),
        ("A first sentence. Of two, the\nsecond.", [0]),
        ("What a rank holds is\nfreed.", [0]),
        ("It ends.\n**What has not run:** NCCL does.", [1]),
        ("What has version 1.5 of it.", [0]),
        ("What is it? It is a rank.", []),
        ("It says what it holds. Off it goes, then.", []),
        ("Of course, it ends.", []),
        ("It is one\nOf three, by name.", []),
    ],
)
def test_which_sentences_are_found(text: str, lines: list[int]) -> None:
    assert [line for line, _ in late_sentences(text)] == lines


def test_parts_of_a_page() -> None:
    page = "# What is it.\n\nA\nparagraph.\n\n- an item\n  of two lines\n- one\n\n    code\n\n| a | b c |\n| d | e |\n"
    assert list(parts(page)) == [
        (3, "A\nparagraph."),
        (6, "an item\n  of two lines"),
        (8, "one"),
        *((12, "a"), (12, "b c"), (13, "d"), (13, "e")),
    ]
