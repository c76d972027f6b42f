"""Scripts of which nothing is the machine's: the words of their commands are those that bash passes.

Each script calls SHOW, which bash runs as a function that writes its arguments to a file.
"""

import os
import random
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megarl.migrate.shell.worlds import follow

BASH = shutil.which("bash")
pytestmark = pytest.mark.skipif(BASH is None, reason="these tests compare with bash, which is not installed")
_SHOW = """SHOW() { printf '%s\\0' "$@" >> "$SHOWN"; printf '\\1\\0' >> "$SHOWN"; }\n"""
SCRIPTS = Path(__file__).with_name("scripts.txt").read_text().strip("\n").split("\n---\n")


def _by_bash(script: Path) -> list[list[str]]:
    shown, prelude = script.with_name("shown"), script.with_name("prelude.sh")
    shown.write_bytes(b"")
    prelude.write_text(_SHOW)
    environment = {"HOME": str(Path.home()), "PATH": os.environ["PATH"], "BASH_ENV": str(prelude), "SHOWN": str(shown)}
    subprocess.run(
        [str(BASH), str(script)],
        env=environment,
        cwd=script.parent,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        check=False,
    )
    return [call.split("\0")[:-1] for call in shown.read_text().split("\1\0")[:-1]]


def _is_show(words: Sequence[str]) -> bool:
    return words[0] == "SHOW"


def _compare(script: Path) -> None:
    """Compare all calls of SHOW; without arguments printf writes one empty text, as it does for an empty argument."""
    followed = follow(script, _is_show, variables={})
    (world,) = followed.worlds
    ours = [[followed.holes.assume(word) for word, _ in command.words[1:]] or [""] for command in world.commands]
    assert ours == _by_bash(script)


@pytest.mark.parametrize("number", range(len(SCRIPTS)))
def test_words_are_those_of_bash(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "run.sh"
    script.write_text(SCRIPTS[number] + "\n")
    _compare(script)


_NAMES = ("A", "B", "C")
# N stands for a name, I for a number; a line has one each.
_EXPANSIONS = [
    r"",
    r"${N}",
    r"${N:-d w}",
    r"${N-d}",
    r"${N:+s}",
    r"${#N}",
    r"${N#*a}",
    r"${N##*/}",
    r"${N%.*}",
    r"${N%%[.=]*}",
    r"${N/a/Z}",
    r"${N//[ae]/_}",
    r"${N:I}",
    r"${N:1:I}",
    r"${N^^}",
    r"${L[@]}",
    r"${L[*]}",
    r"${#L[@]}",
    r"${L[I]}",
    r"${L[@]:I}",
    r"$#",
    r"$?",
    r"$*",
    r'$(echo "${N}  z")',
    r'$(basename "x/${N:-q}")',
    r"$((I * 3 - ${#N}))",
    r"$(( I > 1 ? ${#N} : 2 ** I ))",
    r"${N:-${B:-in ner}}",
    r"${L[@]:-none}",
    r"${M:-$((1 + I))}",
    r"",
][1:-1]


class _Author:
    """Writes random scripts from the parts that launchers have."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def one(self, *choices: Callable[[], str]) -> str:
        return self.random.choice(choices)()

    def text(self) -> str:
        return self.random.choice(["x", "lr=1e-6", "a.b", "7", "10", "a/b.c", "", "it s", "*", "$q", "a'b", "-1"])

    def name(self) -> str:
        return self.random.choice(_NAMES)

    def expansion(self) -> str:
        name, number = self.name(), self.random.randrange(4)
        form = self.random.choice(_EXPANSIONS)
        return form.replace("N", name).replace("I", str(number))

    def word(self) -> str:
        return self.one(
            lambda: f'"{self.text().replace("$", chr(92) + "$")}{self.expansion()}"',
            self.expansion,
            lambda: "'" + self.text().replace("'", "'\\''") + "'",
            lambda: f"k={self.expansion()}" if self.random.random() < 0.7 else "p{1..3}q",
            lambda: self.random.choice(["a{x,y}b", "\\$A", "a\\ b", "$'t\\tb'", '""', "v#w", "{}", "[1,2]"]),
        )

    def words(self) -> str:
        return " ".join(self.word() for _ in range(self.random.randrange(1, 4)))

    def test(self) -> str:
        return self.one(
            lambda: f'[[ "{self.expansion()}" == {self.random.choice(["a*", "x", "*[0-9]*", "?"])} ]]',
            lambda: f'[ -n "{self.expansion()}" ]',
            lambda: f'[ "{self.expansion()}" != x ]',
            lambda: f"(( ${{#{self.name()}}} > {self.random.randrange(4)} ))",
            lambda: f"[[ -z ${{{self.name()}:-}} || ${{#L[@]}} -ge {self.random.randrange(3)} ]]",
            lambda: self.random.choice(["true", "false", "! true", "[ $# -eq 0 ]"]),
        )

    def statement(self, depth: int = 0) -> str:
        simple: tuple[Callable[[], str], ...] = (
            lambda: f"SHOW {self.words()}",
            lambda: f"{self.name()}={self.word() if self.random.random() < 0.8 else '$((2 + 3))'}",
            lambda: f'{self.name()}+="{self.expansion()}"',
            lambda: f"L=({self.words()})",
            lambda: f"L+=({self.words()})",
            lambda: f"set -- {self.words()}",
            lambda: f"{self.test()} && SHOW yes || SHOW no",
            lambda: f"read -r -d '' {self.name()} <<EOF\n{self.expansion()} \\\n  two\nEOF\n",
        )
        if depth > 1:
            return self.one(*simple)
        return self.one(
            *simple,
            lambda: (
                f"if {self.test()}; then {self.block(depth)}\nelif {self.test()}; then :; else {self.block(depth)}\nfi"
            ),
            lambda: f"for C in {self.words()}; do\n{self.block(depth)}\ndone",
            lambda: f'case "{self.expansion()}" in a*|x) {self.block(depth)} ;; *) SHOW {self.word()};; esac',
            lambda: f"f() {{ local A=$1; {self.block(depth)}\n}}; f {self.words()}",
            lambda: f"( {self.block(depth)}\n)",
            lambda: f"for ((i = 0; i < 3; i++)); do [ $i = 1 ] && continue; SHOW $i; {self.block(depth)}\ndone",
        )

    def block(self, depth: int) -> str:
        return "".join(self.statement(depth + 1) + "\n" for _ in range(self.random.randrange(1, 3)))

    def script(self) -> str:
        return "\n".join([*(self.statement() for _ in range(8)), 'SHOW "$A" "$B" "$C" "${L[@]}"'])


@pytest.mark.parametrize("seed", range(8))
def test_random_scripts(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(15):
        script = tmp_path / "run.sh"
        script.write_text("set -f\n" + _Author(1000 * seed + number).script() + "\n")
        _compare(script)
