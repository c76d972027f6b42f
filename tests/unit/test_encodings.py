"""Files are read and written as UTF-8, not in the encoding of whatever locale a command runs in."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.syntax import nodes_of

ROOT = Path(__file__).parents[2]
# `open` of other things than files: what it is called on.
OTHERS = ("os", "Image", "tracker", "self._memory", "chat_server()")
PROCESSES = ("run", "Popen", "check_output")


def unspecified(source: str) -> Iterator[int]:
    """Yield the lines of calls that read or write text without saying in which encoding."""
    for call in nodes_of(source):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute | ast.Name):
            continue
        is_method = isinstance(call.func, ast.Attribute)
        name = call.func.attr if isinstance(call.func, ast.Attribute) else call.func.id
        named = {keyword.arg: keyword.value for keyword in call.keywords}
        if "encoding" in named:
            continue
        if name in ("read_text", "write_text"):
            yield call.lineno
        if name in ("open", "fdopen"):
            of = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
            place = 0 if is_method and name == "open" else 1
            mode = named.get("mode", call.args[place] if len(call.args) > place else ast.Constant("r"))
            is_bytes = isinstance(mode, ast.Constant) and "b" in str(mode.value)
            if not is_bytes and (name == "fdopen" or of not in OTHERS):
                yield call.lineno
        if name in PROCESSES and {"text", "universal_newlines"} & named.keys():
            yield call.lineno


@pytest.mark.parametrize("room", ["megarl", "megarl_answers", "megarl_lab", "megarl_sandbox", "tools"])
def test_every_text_has_an_encoding(room: str) -> None:
    files = sorted((ROOT / room).rglob("*.py"))
    missing = [f"{file}:{line}" for file in files for line in unspecified(file.read_text(encoding="utf-8"))]
    assert not missing, 'say encoding="utf-8"'


def test_what_counts_as_unspecified() -> None:
    source = (
        "file.read_text()\nfile.write_text('a')\nopen(file)\nopen(file, 'rb')\nfile.open('a')\nfile.open('wb')\n"
        "subprocess.run(command, text=True)\nsubprocess.run(command)\nos.open(file, flags)\nos.fdopen(1, 'w')\n"
        "file.read_text(encoding='utf-8')\n"
    )
    assert list(unspecified(source)) == [1, 2, 3, 5, 7, 10]
