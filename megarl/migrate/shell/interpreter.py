"""Follow the statements of a script as bash would run them with no arguments; no command of its is started.

Commands that are not the shell's own are taken to change nothing in it; their output and their status are not known.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from megarl.migrate.shell import syntax
from megarl.migrate.shell.commands import Commands, subshell
from megarl.migrate.shell.conditions import ConditionReader
from megarl.migrate.shell.flow import Break, Continue, Exit, forget_assigned, is_inert
from megarl.migrate.shell.machine import Machine, Undecided
from megarl.migrate.shell.state import MAX_DEPTH, ShellLimitError
from megarl.migrate.shell.words import expand_pattern, expand_text, expand_words

if TYPE_CHECKING:
    from tree_sitter import Node

# Statements whose failure ends a script after `set -e`.
_FAILING = (*syntax.SIMPLE, "pipeline", "subshell", "redirected_statement")


def run_source(machine: Machine, source: str, line: int) -> int | None:
    """Run the text of a script that starts at a line of its file, and return its status."""
    machine.budget.text(len(source))
    if machine.depth >= MAX_DEPTH:
        raise ShellLimitError(f"more than {MAX_DEPTH} scripts, functions and substitutions in one another")
    machine.depth += 1
    try:
        root = syntax.parse(source, line)
        return _Run(machine, line).statements(root.children)
    finally:
        machine.depth -= 1


def captured(machine: Machine, source: str) -> str | None:
    """Return what a command prints, without the ends of line at its end, or None if that is not known."""
    output, machine.output = machine.output, []
    try:
        machine.substituted = subshell(machine, lambda: run_source(machine, source, machine.line))
        parts = machine.output
    finally:
        machine.output = output
    if any(part is None for part in parts):
        return None
    text = "".join(part for part in parts if part is not None).rstrip("\n")
    machine.budget.text(len(text))
    return text


class _Run(Commands):
    """The statements of one source text. first: the line of the file where the text starts."""

    def run_text(self, source: str, line: int) -> int | None:
        return run_source(self.machine, source, line)

    def printed_by(self, source: str) -> str | None:
        return captured(self.machine, source)

    def line(self, node: "Node") -> int:
        return self.first + node.start_point[0]

    def statements(self, nodes: Iterable["Node"], *, tested: bool = False) -> int | None:
        """Run statements one after the other. tested: their status is that of a condition, so `set -e` ignores it."""
        nodes = [node for node in nodes if node.type != "comment"]
        status: int | None = 0
        for node, after in zip(nodes, [*nodes[1:], None], strict=True):
            if not node.is_named:
                continue
            if after is not None and after.type == "&":
                subshell(self.machine, lambda node=node: self.run(node))  # type: ignore[misc]
                status = 0
            else:
                status = self.run(node, tested=tested)
        return status

    def run(self, node: "Node", *, tested: bool = False) -> int | None:
        """Run one statement, and return its status."""
        machine = self.machine
        machine.budget.step()
        machine.line = self.line(node)
        kind = node.type
        if kind in syntax.SIMPLE:
            status = self.simple(syntax.text_of(node), tested=tested)
        else:
            status = getattr(self, f"_{kind}", self._unknown)(node, tested=tested)
        machine.state.status = status
        if (
            status
            and not tested
            and "e" in machine.state.options
            and (kind in _FAILING or syntax.text_of(node).startswith("(("))
        ):
            machine.ended = f"line {machine.line}: set -e ends the script, as a command there fails"
            raise Exit(status)
        return status

    def _unknown(self, node: "Node", *, tested: bool) -> int | None:
        raise syntax.ShellSyntaxError(f"not followed: {syntax.text_of(node)[:60]}", self.line(node))

    def _redirected_statement(self, node: "Node", *, tested: bool) -> int | None:
        machine = self.machine
        inner = node.children[0]
        heredoc = next((child for child in node.children if child.type == "heredoc_redirect"), None)
        body, text = "", syntax.text_of(node)
        if heredoc is not None:
            body, text = self.heredoc(node, heredoc)
        if inner.type in syntax.SIMPLE or not inner.is_named or inner.type.endswith("redirect"):
            machine.line = self.line(node)
            return self.simple(text, tested=tested, body=body)
        stdin, output = machine.stdin, machine.output
        try:
            redirections = text.encode()[inner.end_byte - node.start_byte :].decode()
            command = syntax.split(redirections)
            for redirection in command.redirections:
                self.redirect(redirection, body)
            status = self.run(inner, tested=tested)
        finally:
            machine.stdin, machine.output = stdin, output
        if command.rest.strip():
            return self.rest(command, status, None, machine.line, tested=tested)
        return status

    def heredoc(self, node: "Node", heredoc: "Node") -> tuple[str, str]:
        """Return the body of a here-document, and the text of its command without it."""
        parts = {child.type: child for child in heredoc.children}
        found = parts.get("heredoc_body")
        text = syntax.text_of(node)
        if found is None:
            return "", text
        raw = syntax.text_of(found)
        opener = syntax.text_of(heredoc.children[0])
        if opener == "<<-":
            raw = "".join(line.lstrip("\t") for line in raw.splitlines(keepends=True))
        is_plain = any(each in syntax.text_of(parts["heredoc_start"]) for each in "'\"\\")
        body = raw if is_plain else expand_text(self.machine, raw, here=True)
        source = text.encode()
        end = parts["heredoc_end"].end_byte if "heredoc_end" in parts else found.end_byte
        kept = source[: found.start_byte - node.start_byte] + source[end - node.start_byte :]
        return body, kept.decode().rstrip("\n")

    def _variable_assignments(self, node: "Node", *, tested: bool) -> int | None:
        return self.simple(syntax.text_of(node), tested=tested)

    def _list(self, node: "Node", *, tested: bool) -> int | None:
        left, operator, right = (child for child in node.children if child.type != "comment")
        status = self.run(left, tested=True)
        goes_on_if = operator.type == "&&"
        if status is None and is_inert(self.machine, right):
            return None
        if self.holds(status, syntax.text_of(left), self.line(left)) != goes_on_if:
            return status if status is not None else int(goes_on_if)
        return self.run(right, tested=tested)

    def _pipeline(self, node: "Node", *, tested: bool) -> int | None:
        machine = self.machine
        *first, last = [child for child in node.children if child.is_named and child.type != "comment"]
        stdin, output = machine.stdin, machine.output
        try:
            for each in first:
                machine.output = []
                status = subshell(machine, lambda each=each: self.run(each, tested=True))  # type: ignore[misc]
                printed = machine.output
                machine.stdin = None if printed is None or None in printed else "".join(map(str, printed))
            machine.output = output
            last_status = subshell(machine, lambda: self.run(last, tested=True))
        finally:
            machine.stdin, machine.output = stdin, output
        if "pipefail" in machine.state.options and not last_status:
            return None if status is None else (status or last_status)
        return last_status

    def _negated_command(self, node: "Node", *, tested: bool) -> int | None:
        status = self.run(node.children[-1], tested=True)
        return None if status is None else int(not status)

    def _subshell(self, node: "Node", *, tested: bool) -> int | None:
        return subshell(self.machine, lambda: self.statements(node.children[1:-1], tested=tested))

    def _compound_statement(self, node: "Node", *, tested: bool) -> int | None:
        text = syntax.text_of(node)
        if not text.startswith("(("):
            return self.statements(node.children[1:-1], tested=tested)
        try:
            return int(self.machine.calculate(expand_text(self.machine, text[2:-2], here=True)) == 0)
        except Undecided as undecided:
            forget_assigned(self.machine, node)
            return 1 if "bash refuses" in undecided.why else None

    def _function_definition(self, node: "Node", *, tested: bool) -> int | None:
        name = node.child_by_field_name("name")
        assert name is not None
        self.machine.state.functions[syntax.text_of(name)] = (node, self.first)
        return 0

    def _if_statement(self, node: "Node", *, tested: bool) -> int | None:
        pending = [node, *(child for child in node.children if child.type in ("elif_clause", "else_clause"))]
        for clause in pending:
            children = [child for child in clause.children if child.type not in ("elif_clause", "else_clause", "fi")]
            if clause.type == "else_clause":
                return self.statements(children[1:], tested=tested)
            then = next(i for i, child in enumerate(children) if child.type == "then")
            condition = children[1:then]
            status = self.statements(condition, tested=True)
            if status is None and is_inert(self.machine, node):
                return None
            text = " ".join(syntax.text_of(child) for child in condition if child.is_named)
            if self.holds(status, text, self.line(clause)):
                return self.statements(children[then + 1 :], tested=tested)
        return 0

    def _case_statement(self, node: "Node", *, tested: bool) -> int | None:
        machine = self.machine
        subject = node.child_by_field_name("value")
        assert subject is not None
        text = expand_text(machine, syntax.text_of(subject))
        items = [child for child in node.children if child.type == "case_item"]
        status: int | None = 0
        falls = False
        for item in items:
            machine.line = self.line(item)
            written, body, ending = syntax.case_patterns(item)
            if not falls:
                test = ConditionReader(machine=machine, tokens=[], double=True)
                results = [test.matches(text, expand_pattern(machine, each)) for each in written]
                matched = True if True in results else None if None in results else False
                if matched is None and is_inert(machine, node):
                    continue
                if not self.holds(
                    None if matched is None else int(not matched),
                    f"case {machine.holes.show(text)} in {'|'.join(written)})",
                    self.line(item),
                ):
                    continue
            status = self.statements(body, tested=tested)
            if ending not in (";&", ";;&"):
                return status
            falls = ending == ";&"
        return status

    def loop(self, body: "Node", *, tested: bool) -> tuple[int | None, bool]:
        """Run the body of a loop once; return its status and whether the loop goes on."""
        try:
            return self.statements(body.children[1:-1], tested=tested), True
        except Break as end:
            goes_on = isinstance(end, Continue)
            if end.levels > 1:
                raise type(end)(end.levels - 1) from None
            return 0, goes_on

    def any_number_of_times(self, node: "Node", body: "Node", *, tested: bool) -> int | None:
        """Run a loop whose number of rounds is not known: what it assigns is not known, before a round and after."""
        if is_inert(self.machine, node):
            return None
        forget_assigned(self.machine, node)
        self.loop(body, tested=tested)
        forget_assigned(self.machine, node)
        return None

    def _while_statement(self, node: "Node", *, tested: bool) -> int | None:
        body = node.child_by_field_name("body")
        assert body is not None
        condition = [child for child in node.children[1:] if child.id != body.id]
        wanted = node.children[0].type == "while"
        status: int | None = 0
        seen = len(self.machine.commands)
        while True:
            outcome = self.statements(condition, tested=True)
            if outcome is None:
                return self.any_number_of_times(node, body, tested=tested)
            if (outcome == 0) != wanted:
                return status
            before = len(self.machine.commands)
            status, goes_on = self.loop(body, tested=tested)
            last = self.machine.commands[before:]
            if not goes_on or (last and last == self.machine.commands[seen:before][-len(last) :]):
                # It starts the same command again and again.
                return status

    def _for_statement(self, node: "Node", *, tested: bool) -> int | None:
        machine = self.machine
        name, body = node.child_by_field_name("variable"), node.child_by_field_name("body")
        assert name is not None
        assert body is not None
        if node.children[0].type == "select":
            return self.any_number_of_times(node, body, tested=tested)
        words, is_known = list[str](), True
        for raw, lines in syntax.for_words(node):
            texts = [text for text, _ in expand_words(machine, [(raw, lines)], self.line(node))]
            is_exact = raw.startswith('"') and "[@]" not in raw
            is_known = is_known and (is_exact or all(machine.holes.assume(text) is not None for text in texts))
            words += texts
        if not is_known:
            machine.assign(syntax.text_of(name), machine.hole(f"${syntax.text_of(name)}", "a word of a loop"))
            return self.any_number_of_times(node, body, tested=tested)
        status: int | None = 0
        for word in words:
            machine.assign(syntax.text_of(name), word)
            status, goes_on = self.loop(body, tested=tested)
            if not goes_on:
                break
        return status

    def _c_style_for_statement(self, node: "Node", *, tested: bool) -> int | None:
        machine = self.machine
        body = node.child_by_field_name("body")
        assert body is not None
        text = syntax.text_of(node)
        parts = (*text[text.index("((") + 2 : text.index("))")].split(";"), "", "")[:3]
        status: int | None = 0
        try:
            machine.calculate(expand_text(machine, parts[0], here=True))
            while machine.calculate(expand_text(machine, parts[1], here=True) if parts[1].strip() else "1"):
                machine.budget.step()
                status, goes_on = self.loop(body, tested=tested)
                if not goes_on:
                    break
                machine.calculate(expand_text(machine, parts[2], here=True))
        except Undecided:
            return self.any_number_of_times(node, body, tested=tested)
        return status
