"""Every message that users see explains itself or has an entry in docs/failures.md, which has no others."""

import ast
import re
from functools import cache

import pytest

from tools.messages import GAP, LEAST, ROOT, MessageCollector, messages, render, sources, telling

GUIDE = ROOT / "docs" / "failures.md"


@cache
def entries() -> tuple[str, ...]:
    """What the page quotes at the beginning of an item about messages; `…` stands for what varies."""
    page = GUIDE.read_text(encoding="utf-8")
    sections = (page.split(f"\n## {name}\n")[1].split("\n## ")[0] for name in ("Before the start", "During the run"))
    heads = (head for text in sections for head in re.findall(r"^- (`.+?`): ", text, re.M | re.S))
    return tuple(" ".join(quoted.split()) for head in heads for quoted in re.findall(r"`([^`]+)`", head))


def quotes(entry: str, text: str) -> bool:
    """Whether the pieces of an entry stand in a text, in their order."""
    start = 0
    for piece in entry.split("…"):
        if (found := text.find(piece, start)) < 0:
            return False
        start = found + len(piece)
    return True


def test_every_message_explains_itself_or_has_an_entry() -> None:
    specific = [entry for entry in entries() if telling(entry, "…") >= LEAST]
    assert len(messages()) > 250
    missing = [
        f"{message.place}: {message.text.replace(GAP, '…')}"
        for message in messages()
        if not message.explains_itself and not any(quotes(entry, message.text) for entry in specific)
    ]
    assert not missing, f"say what to do after a semicolon, or write an entry in {GUIDE.name}:\n" + "\n".join(missing)


def test_every_message_is_listed() -> None:
    """On the page of the site, by the place that gives it."""
    page = render()
    assert page.count("\n| `") > 250
    assert {message.place.rpartition(":")[0] for message in messages()} == set(
        re.findall(r"\| `([^`]*)` \|$", page, re.M)
    )


def test_every_entry_is_of_a_message() -> None:
    """Each piece of it stands in the code, where a text may be written in several parts."""
    code = re.sub(r'"\s*\n\s*f?"', "", "\n".join(sources().values()))
    code = code.replace("{{", "{").replace("}}", "}")
    stale = [entry for entry in entries() if not all(piece in code for piece in entry.split("…"))]
    assert not stale, f"{GUIDE.name} quotes what no message says:\n" + "\n".join(stale)


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
    assert " ".join(message.text for message in MessageCollector("data/files.py", ast.parse(code)).found) == expected


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ('raise DataError("a: got 1, expected 2")', True),
        ('raise RunError("the storage is full; free space")', True),
        ('raise RunError("the storage is full: 3 MiB")', False),
        ('Cause("full", remedy="free space")', True),
    ],
)
def test_messages_that_explain_themselves(code: str, expected: bool) -> None:
    assert [message.explains_itself for message in MessageCollector("data/files.py", ast.parse(code)).found] == [
        expected
    ]
