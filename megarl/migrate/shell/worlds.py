"""Follow a script for both outcomes of every condition that is not decidable."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.errors import ConfigError
from megarl.migrate.shell.flow import Break, Exit
from megarl.migrate.shell.holes import Holes
from megarl.migrate.shell.interpreter import captured, run_source
from megarl.migrate.shell.machine import Decisions, Machine, StartedCommand, Undecided
from megarl.migrate.shell.state import Budget, ShellLimitError
from megarl.migrate.shell.syntax import ShellSyntaxError

MAX_WORLDS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One way that a script can go.

    decisions: the conditions that are not decidable, with the outcome that this world has for each. commands: those
    that were asked for, in order. status: that of the script. ended: why it ended early, empty if it did not.
    """

    decisions: tuple[tuple[str, bool], ...]
    commands: tuple[StartedCommand, ...]
    status: int | None
    ended: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """All ways that a script can go, and what that rests on: `unset` are the variables that are set nowhere."""

    worlds: tuple[World, ...]
    holes: Holes
    assumptions: tuple[str, ...]
    unset: tuple[str, ...]


def follow(
    path: Path,
    wanted: Callable[[Sequence[str]], bool],
    *,
    variables: Mapping[str, str],
    arguments: Sequence[str] = (),
) -> Followed:
    """Follow a script; raise ConfigError if it is not valid, or asks for more than the limits allow.

    wanted: whether to keep a command, given by its words. variables, arguments: what the script is run with.
    """
    try:
        source = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text; give a shell script") from None
    holes, budget = Holes(), Budget()
    pending: list[tuple[bool, ...]] = [()]
    worlds: list[World] = []
    assumptions: dict[str, None] = {}
    unset: dict[str, int] = {}
    while pending:
        machine = Machine(
            interpret=run_source,
            capture=captured,
            wanted=wanted,
            holes=holes,
            budget=budget,
            decisions=Decisions(given=pending.pop()),
            assumptions=assumptions,
            unset=unset,
        )
        machine.state.frames[0].update(variables, HOME=str(Path.home()))
        machine.state.exported |= {*variables, "HOME"}
        machine.state.arguments[0] += arguments
        machine.state.directory = str(Path.cwd())
        machine.state.zero = machine.state.file = str(path.absolute())
        worlds.append(_world(machine, source, path))
        taken = worlds[-1].decisions
        pending += [
            (*(outcome for _, outcome in taken[:index]), not taken[index][1])
            for index in range(len(machine.decisions.given), len(taken))
        ]
        if len(worlds) > MAX_WORLDS:
            named = "; ".join(dict.fromkeys(condition for world in worlds for condition, _ in world.decisions))
            raise ConfigError(
                f"{path}: it can go more than {MAX_WORLDS} ways, by conditions that only the machine decides: "
                f"{named[:400]}; give their variables after the file as NAME=VALUE, or convert a simpler script"
            )
    return Followed(worlds=tuple(worlds), holes=holes, assumptions=tuple(assumptions), unset=tuple(unset))


def _world(machine: Machine, source: str, path: Path) -> World:
    try:
        try:
            status = run_source(machine, source, 1)
        except (Exit, Break) as end:
            status = getattr(end, "status", 0)
    except ShellSyntaxError as error:
        raise ConfigError(f"{path}: line {error.line}: {error}; bash -n {path} checks its syntax") from None
    except ShellLimitError as error:
        raise ConfigError(f"{path}: line {machine.line}: {error}; convert a simpler script") from None
    except Undecided as undecided:
        raise ConfigError(
            f"{path}: {undecided.why}, which decides what is assigned; convert a simpler script"
        ) from None
    except RecursionError:
        raise ConfigError(f"{path}: line {machine.line}: nested too deeply; convert a simpler script") from None
    return World(
        decisions=tuple(machine.decisions.taken),
        commands=tuple(machine.commands),
        status=status,
        ended=machine.ended,
    )
