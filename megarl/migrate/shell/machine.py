"""Hold what the parts of the interpreter share: the state of the shell, its variables, its decisions and its output."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from megarl.migrate.shell import arithmetic
from megarl.migrate.shell.holes import Hole, Holes
from megarl.migrate.shell.state import Array, Budget, State, Value

# Set in any shell, each to something else.
_SYSTEM = re.compile(
    r"USER|LOGNAME|HOSTNAME|PATH|SHELL|LANG|LC_ALL|TERM|UID|EUID|PPID|BASHPID|RANDOM|SRANDOM|SECONDS|EPOCH\w+|SHLVL"
    r"|LINENO|OLDPWD|FUNCNAME|(HOST|OS|MACH)TYPE|BASH_(?!ENV)\w+|COLUMNS|LINES|OPTIND|OPTARG|REPLY|PIPESTATUS|[$!_-]"
)
_SCHEDULER = re.compile(r"(SLURM|SLURMD|SBATCH|PBS|LSB|SGE|OMPI|PMI|KUBERNETES)_\w+")


@dataclass(slots=True)
class Decisions:
    """The outcomes of the conditions that are not decidable: those given first, then true for each further one."""

    given: tuple[bool, ...] = ()
    taken: list[tuple[str, bool]] = field(default_factory=list)

    def take(self, condition: str) -> bool:
        """Return the outcome of the next condition."""
        index = len(self.taken)
        outcome = self.given[index] if index < len(self.given) else True
        self.taken.append((condition, outcome))
        return outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedCommand:
    """A command that the script starts and that somebody asked for: its words, with their lines."""

    words: tuple[tuple[str, int], ...]
    line: int


class Undecided(Exception):  # noqa: N818 - not an error: the value becomes a hole
    """A value is not known; `why` says why not."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


@dataclass(slots=True, kw_only=True)
class Machine:
    """A shell that runs a script, once.

    interpret, capture: run a script's text and return its status, or what it prints (see `interpreter`).
    wanted: whether a command, given by its words, is to be kept in `commands`.
    line: the line that runs. output: what is printed, where that is captured; None is an unknown part. stdin: the text
    that `read` reads, None if it is not known. assumptions: what the result rests on. unset: variables that were read
    and are set nowhere. open: why a variable that the script does not set may be set all the same.
    """

    interpret: Callable[["Machine", str, int], int | None]
    capture: Callable[["Machine", str], str | None]
    wanted: Callable[[list[str]], bool]
    holes: Holes
    budget: Budget
    decisions: Decisions
    state: State = field(default_factory=State)
    commands: list[StartedCommand] = field(default_factory=list)
    assumptions: dict[str, None] = field(default_factory=dict)
    unset: dict[str, int] = field(default_factory=dict)
    line: int = 1
    depth: int = 0
    output: list[str | None] | None = None
    stdin: str | None = None
    open: str = ""
    ended: str = ""
    softened: bool = False
    substituted: int | None = 0

    def hole(self, text: str, why: str, assumed: str | None = None) -> str:
        """Return a text that is not known, as the script writes it in this line."""
        reason = why if why.startswith("line ") else f"line {self.line}: {why}"
        return self.holes.new(Hole(text=" ".join(text.split()), why=reason, assumed=assumed))

    def get(self, name: str) -> Value | None:
        """Return the value of a variable or parameter, None if it is not set."""
        self.budget.step()
        if name.isdigit():
            arguments = self.state.arguments[-1]
            index = int(name[:6])
            if index == 0:
                return self.state.zero
            return arguments[index - 1] if index <= len(arguments) else None
        if name == "#":
            return str(len(self.state.arguments[-1]))
        if name in ("@", "*"):
            return Array(dict(enumerate(self.state.arguments[-1])))
        if name == "?":
            status = self.state.status
            return self.hole("$?", "the status of a command that is not run") if status is None else str(status)
        value = self.state.get(name)
        if value is None:
            if name == "PWD":
                return self.hole("$PWD", "the directory is not known") if not self.state.directory else self.directory()
            if name in ("BASH_SOURCE", "BASH_ARGV0"):
                return self.state.file
            if _SYSTEM.fullmatch(name):
                return self.hole(f"${name}", f"${name} is the machine's")
            if _SCHEDULER.fullmatch(name):
                return self.hole(f"${name}", f"${name} is set by the scheduler of jobs")
            if self.open:
                return self.hole(f"${name}", f"${name} may be set by {self.open}")
        return value

    def directory(self) -> str:
        """Return the directory where commands run; raise Undecided if it is not known."""
        if self.state.directory is None:
            raise Undecided("the directory is not known")
        if self.state.directory == str(Path.cwd()):
            self.assumptions[f"The script is run in {self.state.directory}."] = None
        return self.state.directory

    def missing(self, name: str, written: str) -> str:
        """Return the text of a variable that is set nowhere, and note that it is missing."""
        if name in "@*":
            return ""
        self.unset.setdefault(name, self.line)
        if name.isdigit():
            return self.hole(written, f"there is no argument {name} (script run without arguments)", "")
        if "u" in self.state.options:
            return self.hole(written, f"{name} is not set in the script, which needs it (set -u)")
        return self.hole(written, f"{name} is not set in the script", "")

    def assign(self, name: str, value: Value, key: str | None = None, *, append: bool = False) -> None:
        """Set a variable, or one element of an array (`key`, an arithmetic expression if the array has numbers)."""
        self.budget.step()
        if name in self.state.read_only:
            return
        before = self.state.get(name)
        if name in self.state.typed:
            value = self.hole(f"${name}", "a variable declared with -i, -l or -u")
        if key is not None and isinstance(value, str):
            array = before if isinstance(before, Array) else Array({0: before} if before else {})
            index: int | str = key if array.named else self.index(key, array)
            value = array.with_item(index, (array.items.get(index, "") if append else "") + value)
        elif append and isinstance(value, Array):
            array = before if isinstance(before, Array) else Array({} if before is None else {0: before})
            if value.named:
                value = Array({**array.items, **value.items}, named=True)
            else:
                start = 1 + max((int(index) for index in array.items), default=-1)
                value = Array({**array.items, **{start + i: text for i, text in enumerate(value.items.values())}})
        elif isinstance(before, Array) and isinstance(value, str):
            first: int | str = "0" if before.named else 0
            value = before.with_item(first, (before.items.get(first, "") if append else "") + value)
        elif append and isinstance(value, str):
            value = (before if isinstance(before, str) else "") + value
        self.check(value)
        self.state.set(name, value)
        if "a" in self.state.options:
            self.state.exported.add(name)

    def check(self, value: Value) -> None:
        """Count a new value against the limits."""
        self.budget.text(len(value) if isinstance(value, str) else len(value.items))

    def index(self, key: str, array: Array) -> int:
        """Return an index of an array; negative ones count from its end."""
        text = self.holes.assume(key)
        if text is None:
            raise Undecided(f"line {self.line}: an index that is not known")
        index = self.calculate(text)
        return index + 1 + max((int(each) for each in array.items), default=-1) if index < 0 else index

    def calculate(self, expression: str) -> int:
        """Return the value of an arithmetic expression; raise Undecided if it is not known."""

        def read(name: str) -> str:
            base, _, key = name.partition("[")
            value = self.get(base)
            if isinstance(value, Array):
                index: int | str = key[:-1] if value.named else self.index(key[:-1] or "0", value)
                value = value.items.get(index)
            if value is None:
                value = self.missing(base, f"${name}")
            known = self.holes.assume(value)
            if known is None:
                raise Undecided(self.holes.within(value)[0].why)
            self.softened = self.softened or known != value
            return known

        def write(name: str, text: str) -> None:
            base, bracket, key = name.partition("[")
            self.assign(base, text, key[:-1] if bracket else None)

        known = self.holes.assume(expression)
        if known is None:
            raise Undecided(next(hole.why for hole in self.holes.within(expression) if hole.assumed is None))
        try:
            return arithmetic.calculate(known, read, write)
        except arithmetic.ShellArithmeticError as problem:
            raise Undecided(f"line {self.line}: bash refuses $(({known[:40]})): {problem}") from None

    def decide(self, condition: str) -> bool:
        """Return the outcome of a condition that is not decidable, for this world."""
        text = " ".join(condition.split())
        return self.decisions.take(f"line {self.line}: {text if len(text) <= 80 else text[:77] + '...'}")

    def print(self, text: str | None) -> None:
        """Add to the output, if it is captured; None is text that is not known."""
        if self.output is not None:
            self.output.append(text)
            self.budget.text(len(text or ""))
