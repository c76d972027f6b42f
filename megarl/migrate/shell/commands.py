"""Run simple commands: expand their words, follow their assignments and redirections, and find what they start."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.migrate.shell import syntax
from megarl.migrate.shell.builtins import BUILTINS, read_local
from megarl.migrate.shell.conditions import ConditionReader, ShellTestError
from megarl.migrate.shell.declaring import DECLARING, declare
from megarl.migrate.shell.flow import Exit, Return
from megarl.migrate.shell.machine import Machine, StartedCommand, Undecided
from megarl.migrate.shell.state import MAX_DEPTH, Array, ShellLimitError
from megarl.migrate.shell.words import expand_text, expand_words

if TYPE_CHECKING:
    from tree_sitter import Node

# These start the rest of their words as a command of the shell.
_PREFIXES = ("time", "command", "builtin", "!", "-p")
# Commands that only name a file or a process.
_MENTION = frozenset(
    [
        "grep",
        "egrep",
        "pgrep",
        "pkill",
        "killall",
        "ls",
        "cat",
        "cp",
        "mv",
        "rm",
        "mkdir",
        "touch",
        "chmod",
        "sed",
        "awk",
        "tee",
        "diff",
        "which",
        "man",
    ]
)


def subshell(machine: Machine, run: Callable[[], int | None], *, exported_only: bool = False) -> int | None:
    """Run something in a copy of the shell, and return its status; what it assigns is lost."""
    state, ended, line = machine.state, machine.ended, machine.line
    machine.state = state.copy()
    if exported_only:
        known = {name: state.get(name) for name in state.exported}
        machine.state.frames = [{name: value for name, value in known.items() if value is not None}]
        machine.state.options, machine.state.functions = set(), {}
    try:
        status = run()
    except Exit as end:
        status = end.status
    finally:
        machine.state, machine.ended, machine.line = state, ended, line
    return status


class Commands:
    """The simple commands of one source text, which starts in line `first` of its file."""

    def __init__(self, machine: Machine, first: int) -> None:
        self.machine = machine
        self.first = first

    def again(self, first: int) -> "Commands":
        """Return the same for a text that starts in another line."""
        return type(self)(self.machine, first)

    def statements(self, nodes: Iterable["Node"], *, tested: bool = False) -> int | None:
        """Run statements one after the other; see `interpreter`."""
        raise NotImplementedError

    def run(self, node: "Node", *, tested: bool = False) -> int | None:
        """Run one statement; see `interpreter`."""
        raise NotImplementedError

    def run_text(self, source: str, line: int) -> int | None:
        """Run the text of a script; see `interpreter.run_source`."""
        raise NotImplementedError

    def printed_by(self, source: str) -> str | None:
        """Return what a command prints; see `interpreter.captured`."""
        raise NotImplementedError

    def holds(self, status: int | None, text: str, line: int) -> bool:
        """Return whether a condition with this status holds; one that is not known is decided by the world."""
        if status is None:
            self.machine.line = line
            return self.machine.decide(text)
        return status == 0

    def simple(self, text: str, *, tested: bool = False, body: str = "") -> int | None:
        """Run a simple command, and what its text has after it. body: its here-document."""
        machine, line = self.machine, self.machine.line
        stripped = text.lstrip()
        if stripped.startswith("[["):
            return self.test(stripped, double=True)
        try:
            command = syntax.split(text)
        except syntax.ShellSyntaxError as error:
            raise syntax.ShellSyntaxError(str(error), line + error.line) from None
        stdin, output, printed = machine.stdin, machine.output, machine.output
        try:
            for redirection in command.redirections:
                self.redirect(redirection, body)
            if command.operator in ("|", "|&"):
                machine.output = []
            status = self.command(command.words, line, tested=tested)
            printed = machine.output
        finally:
            machine.output = output
            if command.redirections:
                machine.stdin = stdin
        if command.rest.strip():
            status = self.rest(command, status, printed, line + command.lines, tested=tested)
        return status

    def rest(
        self,
        command: syntax.Simple,
        status: int | None,
        printed: Sequence[str | None] | None,
        line: int,
        *,
        tested: bool,
    ) -> int | None:
        """Run what follows a simple command in its text: tree-sitter takes it for a part of it."""
        machine = self.machine

        def run() -> int | None:
            return self.again(line).statements(syntax.parse(command.rest, line).children, tested=tested)

        if command.operator in ("|", "|&"):
            stdin = machine.stdin
            machine.stdin = None if printed is None or None in printed else "".join(map(str, printed))
            status = subshell(machine, run)
            machine.stdin = stdin
            return status
        if command.operator in ("&&", "||"):
            goes_on_if = command.operator == "&&"
            if self.holds(status, f"the command before {command.operator} {command.rest}", line) != goes_on_if:
                return status
        machine.state.status = status
        return run()

    def redirect(self, redirection: syntax.Redirection, body: str) -> None:
        """Follow a redirection, as far as it decides what is read and what is captured."""
        machine = self.machine
        operator, number = redirection.operator, redirection.number
        if operator in ("<<", "<<-"):
            machine.stdin = body
        elif operator == "<<<":
            machine.stdin = expand_text(machine, redirection.target) + "\n"
        elif operator in ("<", "<>", "<&"):
            machine.stdin = None
            if redirection.target.startswith("<("):
                printed = self.printed_by(redirection.target[2:-1])
                machine.stdin = None if printed is None else printed + "\n"
        elif number in ("", "1") and not (operator == ">&" and redirection.target in ("1", "-")):
            machine.output = None

    def command(self, words: list[tuple[str, int]], line: int, *, tested: bool) -> int | None:
        """Run a command given by its words: assignments, then the command itself."""
        machine = self.machine
        count = next((i for i, (word, _) in enumerate(words) if syntax.assignment(word) is None), len(words))
        if count == len(words):
            machine.substituted = 0
            for word, lines in words:
                machine.line = line + lines
                self.assign(word)
            return machine.substituted
        if words[count][0] in DECLARING:
            return declare(machine, words[count][0], words[count + 1 :], line, self.assign)
        arguments = expand_words(machine, words[count:], line)
        if not arguments:
            return machine.state.status
        if not count:
            return self.invoke(arguments, line, tested=tested)
        machine.state.frames.append({})
        machine.state.arguments.append(machine.state.arguments[-1])
        exported = set(machine.state.exported)
        try:
            for word, _ in words[:count]:
                if parts := syntax.assignment(word):
                    machine.state.frames[-1][parts.name] = None
                    self.assign(word)
                    machine.state.exported.add(parts.name)
            return self.invoke(arguments, line, tested=tested)
        finally:
            machine.state.frames.pop()
            machine.state.arguments.pop()
            machine.state.exported = exported

    def assign(self, word: str) -> None:
        """Follow one assignment."""
        machine = self.machine
        parts = syntax.assignment(word)
        assert parts is not None
        if parts.text.startswith("("):
            machine.assign(parts.name, self.array(parts.name, parts.text[1:-1]), append=parts.appends)
            return
        value = expand_text(machine, parts.text, assigned=True)
        key = None if parts.key is None else expand_text(machine, parts.key)
        try:
            machine.assign(parts.name, value, key, append=parts.appends)
        except Undecided as undecided:
            machine.state.set(parts.name, machine.hole(word, undecided.why))

    def array(self, name: str, text: str) -> Array:
        """Return the array that a list in parentheses makes."""
        machine, line = self.machine, self.machine.line
        before = machine.state.get(name)
        result = Array({}, isinstance(before, Array) and before.named)
        index = 0
        for word, lines in syntax.elements(text):
            machine.line = line + lines
            if word.startswith("[") and (end := word.find("]=")) > 0:
                key = expand_text(machine, word[1:end])
                index = 0 if result.named else machine.index(key, result)
                result = result.with_item(key if result.named else index, expand_text(machine, word[end + 2 :]))
                index += 1
                continue
            items = dict(result.items)
            for each, _ in expand_words(machine, [(word, 0)], machine.line):
                items[index] = each
                machine.budget.text(1)
                index += 1
            result = Array(items, result.named)
        machine.line = line
        return result

    def invoke(self, arguments: list[tuple[str, int]], line: int, *, tested: bool) -> int | None:
        """Run a command whose words are expanded: a function, a command of the shell, or another one."""
        machine = self.machine
        words = [word for word, _ in arguments]
        name = words[0]
        while name in _PREFIXES and len(words) > 1:
            arguments, words = arguments[1:], words[1:]
            name = words[0]
        if name == "exec" and len(words) > 1:
            machine.ended = f"line {line}: exec"
            raise Exit(self.invoke(arguments[1:], line, tested=tested))
        if name in machine.state.functions:
            return self.function(name, words[1:], tested=tested)
        if name in ("[", "test"):
            operands = words[1:-1] if name == "[" else words[1:]
            return self.outcome(ConditionReader(machine=machine, tokens=operands, double=False))
        if name in BUILTINS:
            return BUILTINS[name](machine, words[1:])
        machine.print(None)
        if name in _MENTION:
            return None
        if machine.wanted(words):
            machine.commands.append(StartedCommand(words=tuple(arguments), line=line))
            # The script goes on as after a training that succeeds.
            return 0
        return self.inner(words, line)

    def inner(self, words: list[str], line: int) -> int | None:
        """Run scripts that a command gets as text (`bash -c '…'`, `ssh host '…'`) or as a file (`bash train.sh`)."""
        machine = self.machine
        files = [index for index, word in enumerate(words[:3]) if word.endswith(".sh")]
        if files and (words[0] in ("bash", "sh") or files[0] == 0) and not machine.holes.within(words[files[0]]):
            path = Path(machine.state.directory or "/") / words[files[0]]
            source = read_local(path) if machine.state.directory or words[files[0]].startswith("/") else None
            if source is not None:
                return self.script(source, str(path), words[files[0] + 1 :], 1)
        for index, word in enumerate(words[1:], 1):
            if any(each in " \n" for each in word) and machine.wanted(machine.holes.show(word).split()):
                zero = words[index + 1] if index + 1 < len(words) else "bash"
                return self.script(word, zero, words[index + 2 :], line)
        return None

    def script(self, source: str, zero: str, arguments: list[str], line: int) -> int | None:
        """Run a script in a shell of its own, which has only the variables that are exported."""

        def run() -> int | None:
            self.machine.state.arguments = [arguments]
            self.machine.state.zero = self.machine.state.file = zero
            return self.run_text(source, line)

        return subshell(self.machine, run, exported_only=True)

    def function(self, name: str, arguments: list[str], *, tested: bool) -> int | None:
        """Run a function."""
        machine = self.machine
        node, first = machine.state.functions[name]
        if machine.depth >= MAX_DEPTH:
            raise ShellLimitError(f"more than {MAX_DEPTH} scripts, functions and substitutions in one another")
        body = node.child_by_field_name("body")
        assert body is not None
        machine.depth += 1
        machine.state.frames.append({})
        machine.state.arguments.append(list(arguments))
        state = machine.state
        try:
            return self.again(first).run(body, tested=tested)
        except Return as end:
            return end.status
        finally:
            machine.depth -= 1
            state.frames.pop()
            state.arguments.pop()

    def test(self, text: str, *, double: bool) -> int | None:
        inner = text.strip()[2:].rstrip()
        tokens = syntax.test_tokens(inner[:-2] if inner.endswith("]]") else inner)
        return self.outcome(ConditionReader(machine=self.machine, tokens=tokens, double=double))

    def outcome(self, test: ConditionReader) -> int | None:
        try:
            result = test.run()
        except ShellTestError:
            return 2
        return None if result is None else int(not result)
