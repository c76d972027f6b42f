"""What only the machine tells is never guessed; what asks for too much is refused with the limit's name."""

from pathlib import Path

import pytest

from megarl.errors import ConfigError
from megarl.migrate.shell import state
from megarl.migrate.shell.worlds import Followed, follow


def _follow(tmp_path: Path, text: str, *, arguments: tuple[str, ...] = (), **variables: str) -> Followed:
    script = tmp_path / "run.sh"
    script.write_text(text)
    return follow(script, lambda words: words[0] == "train", variables=variables, arguments=arguments)


def _shown(followed: Followed) -> set[tuple[str, ...]]:
    """Return the words of the first command of each world, with holes as the script writes them."""
    return {
        tuple(followed.holes.show(word) for word, _ in world.commands[0].words[1:])
        for world in followed.worlds
        if world.commands
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # Both ways of a condition about a file, about the scheduler, about another command.
        ("A=1; if [ -f x ]; then A=2; fi; train $A", {("1",), ("2",)}),
        ("A=1; [[ $SLURM_NNODES -gt 1 ]] && A=2; train $A", {("1",), ("2",)}),
        ("A=1; if nvidia-smi; then A=2; elif [ -d y ]; then A=3; fi; train $A", {("1",), ("2",), ("3",)}),
        ("case $HOSTNAME in a*) A=1;; b) A=2;; *) A=3;; esac; train $A", {("1",), ("2",), ("3",)}),
        ("L=(a); test -e x || L+=(b); train ${L[@]}", {("a",), ("a", "b")}),
        # Branches that agree.
        ("if [ -f x ]; then A=2; else A=2; fi; train $A", {("2",)}),
        # What commands print, and what follows from it.
        ("A=$(nproc); train $A x$A ${A:-1} $((A * 2))", {("$(nproc)", "x$(nproc)", "${A:-1}", "$((A * 2))")}),
        ("train run-$(date +%s) `hostname` $RANDOM", {("run-$(date +%s)", "`hostname`", "$RANDOM")}),
        ("train $(cat args.txt) $(echo a | tr a b)", {("$(cat args.txt)", "$(echo a | tr a b)")}),
        ("A=$(echo $USER/x); train ${A%/*} ${#A} ${A/x/y}", {("${A%/*}", "${#A}", "${A/x/y}")}),
        ("train ${SLURM_NNODES:-1}", {("${SLURM_NNODES:-1}",)}),
        # Elements of what may be an array.
        (
            "[[ a =~ ^(.)$ ]]; read -a L < file; train ${BASH_REMATCH[1]} ${L[2]:-7}",
            {("${BASH_REMATCH[1]}", "${L[2]:-7}")},
        ),
        ('for f in $(ls); do L+=("$f"); done; train ${L[1]}', {("${L[1]}",)}),
        # A loop of an unknown number of rounds, and a file that is not here.
        ("n=0; while pgrep x; do n=$((n + 1)); done; train $n", {("$n",)}),
        ("for f in $(ls); do A=$f; done; train $A", {("$A",)}),
        ("A=1; source ./none.sh; train $A ${B:-2}", {("$A", "${B:-2}")}),
        ("read A < file; while read -r l; do B=$l; done < file; train $A $B", {("$A", "$B")}),
        ("declare -i A=1+1; train $A ${P@Q} ${!X}", {("$A", "${P@Q}", "${!X}")}),
        ('eval "$(cat settings)"; train ${A:-1}', {("${A:-1}",)}),
        # What is known about a text with a part that is not.
        ('A=run-$(date); [ -n "$A" ] && [[ $A != test-* || $A == "" ]] && train x', {("x",)}),
        ('A=run-$(date); [ "$A" = test ] || train y', {("y",)}),
    ],
)
def test_nothing_is_guessed(text: str, expected: set[tuple[str, ...]], tmp_path: Path) -> None:
    assert _shown(_follow(tmp_path, text)) == expected


def test_the_reason_names_the_line(tmp_path: Path) -> None:
    followed = _follow(tmp_path, "A=1\nB=$(nproc)\ntrain \\\n  $C $B")
    (world,) = followed.worlds
    found = [followed.holes.within(word)[0] for word, _ in world.commands[0].words[1:] if followed.holes.within(word)]
    assert [hole.why for hole in found] == ["line 2: the output of a command that is not run"]
    assert followed.unset == ("C",)
    assert [line for _, line in world.commands[0].words] == [3, 4]


def test_what_is_given_counts(tmp_path: Path) -> None:
    text = 'if [[ ${SMOKE:-0} == 1 ]]; then A=64; fi; train ${A:-4096} "${1:-none}" "$#"'
    assert _shown(_follow(tmp_path, text)) == {("4096", "none", "0")}
    assert _shown(_follow(tmp_path, text, arguments=("x",), SMOKE="1")) == {("64", "x", "1")}


def test_a_file_beside_the_script_is_read(tmp_path: Path) -> None:
    (tmp_path / "model.sh").write_text('ARGS=(--layers 4)\nHERE="${BASH_SOURCE[0]}"\n')
    text = 'D="$(cd "$(dirname "$0")" && pwd)"; source "$D/model.sh"; train "${ARGS[@]}" "$HERE"'
    assert _shown(_follow(tmp_path, text)) == {("--layers", "4", f"{tmp_path}/model.sh")}
    (tmp_path / "inner.sh").write_text("train $A ${B:-unset} $1\n")
    assert _shown(_follow(tmp_path, f"export A=1; B=2; bash {tmp_path}/inner.sh q")) == {("1", "unset", "q")}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("A=x\n" + "A=$A$A\n" * 40 + "train $A", "line 19: a text of more than 131072 characters"),
        ("A=x; while :; do A=y; done; train", "more than 5000 steps"),
        ("set -- a\n" + 'set -- "$@" "$@"\n' * 30 + "train $1", "more than 300000 words in all"),
        (f"A={'x' * 120000}\n" + "train" + " $A" * 700, "line 2: more than 67108864 characters of text in all"),
        ("f() { f; }; f; train", "more than 40 scripts, functions and substitutions in one another"),
        ("train {1..9}{1..9}{1..9}{1..9}{1..9}{1..9}{1..9}", "braces that make more than 10000 words"),
        ("train {1..100000000}", "braces that make more than 10000 words"),
        ("A=$(printf '%099999s'); train", ""),
        ("A=" + "x" * 60000 + "\nA=${A//x/$A}; train", "a text of more than 131072 characters"),
        ("f() { f | f & }; f; train", "more than 40 scripts"),
        ("\n".join(f"A{n}=A{n + 1}+A{n + 1}" for n in range(40)) + "\nA40=1; train $((A0))", "more than 5000 steps"),
        ("train " + "${A:-" * 2000 + "x" + "}" * 2000, "nested too deeply"),
        ("train " + "$(" * 200 + "echo x" + ")" * 200, "more than 40 scripts"),
        ("A=(1); A[$(nproc)]=2; unset 'A[$(nproc)]'; B=([$(nproc)]=1); train", "which decides what is assigned"),
        ("f() { local -n r=$1; r=2; }; A=1; f A; train $A", "line 1: local -n gives a variable another name"),
        ("".join(f"[ -f {n} ] && A{n}=1\n" for n in range(12)) + "train", "it can go more than 128 ways"),
    ],
)
def test_bombs_are_refused(text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "steps" in message:
        monkeypatch.setattr(state, "MAX_STEPS", 5000)
    if not message:
        assert _follow(tmp_path, text).worlds[0].commands
        return
    with pytest.raises(ConfigError, match=message) as raised:
        _follow(tmp_path, text)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("A=1\ntrain it's a\n", 2),
        ('A=1\n\ntrain "a\nb\n', 3),
        ("if true; then\n  train\n", 3),
        ("train\n)\n", 2),
        ("for x in a; do train\n", 2),
        ("A=(1\ntrain a\n", 1),
        ("train $(echo a\n", 1),
        ("train ${A\n", 1),
    ],
)
def test_a_syntax_error_is_one_line_with_its_place(text: str, line: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"run\.sh: line {line}: ") as raised:
        _follow(tmp_path, text)
    assert "\n" not in str(raised.value)
