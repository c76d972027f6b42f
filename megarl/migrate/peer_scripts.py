"""Read the options of a training run from the command that a shell script starts it with.

Bash runs the script with stubs for all programs (`launch_script`). The conversion lists what only a real run tells.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megarl.errors import ConfigError
from megarl.migrate.aliases import RENAMED, RENAMED_AS_HERE
from megarl.migrate.hydra_values import option_value
from megarl.migrate.launch_script import Execution, Followed, follow

# By the word that starts a run, its framework; the first that matches counts.
_LAUNCHERS: Mapping[str, str] = {
    r"\S*openrlhf\S*train_ppo\w*(\.py)?|(\S*[./])?train_ppo_ray(\.py)?": "OpenRLHF",
    r"(\S*[./])?main_mix_ppo(\.py)?": "LUFFY",
    r"(\S*[./])?main_(?!mix|eval|generation)\w+(\.py)?": "verl",
}
# slime, and vime, which took its options over, start this file with these options.
_SLIME = (re.compile(r"(\S*/)?train(_async)?\.py"), ("--hf-checkpoint", "--rollout-batch-size", "--actor-num-nodes"))
# Hydra's arguments: `name=value`, `+name=value`, `++name=value`, and `~name`, which takes the option out.
_OVERRIDE = re.compile(r"(~|\+{0,2})(?P<name>[\w$./-]+)(?:@[\w$.-]*)?(?:=(?P<value>.*))?", re.ASCII | re.DOTALL)
# An option that ran as a command.
_ORPHAN = re.compile(r"--?[A-Za-z].*|[+~]{0,2}[A-Za-z_]\w*(\.\w+)+(=.*)?", re.DOTALL)
_VARIABLE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Open:
    """A value that is not known: how the file writes it, and why it is not known."""

    text: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptOptions:
    """The options of one run by name. unreadable: arguments whose name is not known either, each with the reason."""

    framework: str
    options: Mapping[str, object]
    unreadable: Mapping[str, str] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()


def option_name(name: str, framework: str) -> str:
    """Return the name that `aliases` uses for an option."""
    plain = name.lstrip("+~")
    if framework != "OpenRLHF":
        return plain
    plain = plain.replace("-", "_")
    return RENAMED.get(plain) or RENAMED_AS_HERE.get(plain) or plain


def _overrides(arguments: Sequence[str]) -> Iterator[tuple[str, object]]:
    """Yield name and value of Hydra's arguments, `Open` where Hydra gives the option no value. Flags of Hydra's own,
    such as `--config-name=X`, are named with it.
    """
    for index, argument in enumerate(arguments):
        if argument.startswith("-"):
            name, _, text = argument.lstrip("-").partition("=")
            yield f"hydra.{name}", text or True
        elif not (index and re.fullmatch("-(cn|cp|cd)|--config-(name|path|dir)", arguments[index - 1])):
            yield _override(argument)


def _override(argument: str) -> tuple[str, object]:
    match = _OVERRIDE.fullmatch(argument)
    if match and match[1] == "~":
        return match["name"], Open("(removed)", "~ takes the option out, so the framework decides")
    if match is None or match["value"] is None:
        return argument, Open(
            "(no value)", "Hydra refuses it, and starts no training: it is not of the form name=value"
        )
    try:
        return match["name"], option_value(match["value"])
    except ConfigError as error:
        return match["name"], Open(match["value"], str(error))


def _flags(arguments: Sequence[str]) -> Iterator[tuple[str, object]]:
    """Yield name and value of arguments `--name value ...`."""
    name: str | None = None
    texts: list[str] = []
    for argument in (*arguments, "--"):
        if not argument.startswith("--"):
            texts.append(argument)
            continue
        if name:
            values = [flag_value(text) for text in texts]
            yield name, values[0] if len(values) == 1 else values or True
        name, equals, text = argument[2:].partition("=")
        texts = [text] if equals else []


def flag_value(text: str) -> bool | float | str | None:
    """Read the value of a flag as Python reads it: a number, true, false, None, or else text."""
    words = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _launcher(words: Sequence[str]) -> tuple[int, str] | None:
    """Return the index after the word that starts training, and its framework."""
    for index, word in enumerate(words):
        for launcher, framework in _LAUNCHERS.items():
            if re.fullmatch(launcher, word):
                return index + 1, framework
    return None


def read_script(path: Path, given: Sequence[str], command: int | None, *, run_anyway: bool = False) -> ScriptOptions:
    """Return the options of the command in a script that starts training; raise ConfigError if there is none.

    given: variables of the environment as NAME=VALUE, and arguments of the script. command: which of several, from 1.
    run_anyway: also where there is no sandbox for it.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; give a shell script or a YAML file of verl, OpenRLHF or LUFFY")
    variables = {match[1]: match[2] for each in given if (match := _VARIABLE.fullmatch(each))}
    arguments = [each for each in given if not _VARIABLE.fullmatch(each)]
    followed = follow(path, variables=variables, arguments=arguments, run_anyway=run_anyway)
    runs = [_Run(execution=execution, commands=_trainings(execution)) for execution in followed.executions]
    # An execution that fails before training is not a run.
    runs = [run for run in runs if run.commands or not run.execution.status]
    sites = sorted({site for run in runs for site, _ in run.commands}, key=lambda site: site[1:])
    if not sites:
        raise ConfigError(_nothing(path, followed, given))
    if command is None and len(sites) > 1:
        lines = "; ".join(f"{number}: line {site[1]}" for number, site in enumerate(sites, 1))
        raise ConfigError(f"{path}: {len(sites)} commands start training ({lines}); choose one with --command NUMBER")
    if command is not None and not 1 <= command <= len(sites):
        raise ConfigError(f"--command={command}: {path} has {len(sites)} commands that start training")
    return _merged(runs, sites[(command or 1) - 1], followed, given)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """A run of the script, and the commands in it that start training, each with its place and its words."""

    execution: Execution
    commands: Sequence[tuple["_Site", tuple[str, ...]]]


# The file and the line of a command, and its number among those of that line.
_Site = tuple[str, int, int]


def _trainings(execution: Execution) -> list[tuple[_Site, tuple[str, ...]]]:
    """Return the commands of a run that start training; the same command again counts once."""
    found: dict[tuple[str, ...], _Site] = {}
    for command in execution.commands:
        if _launcher(command.words) and command.words not in found:
            number = sum(site[:2] == (command.file, command.line) for site in found.values())
            found[command.words] = (command.file, command.line, number)
    return [(site, words) for words, site in found.items()]


def _merged(runs: Sequence[_Run], site: _Site, followed: Followed, given: Sequence[str]) -> ScriptOptions:
    """Return the options on which all runs agree; the others are `Open`."""
    found: list[tuple[Execution, dict[str, object]]] = []
    framework, unreadable = "", dict[str, str]()
    for run in runs:
        words = dict(run.commands).get(site)
        if words is None:
            continue
        start, framework = _launcher(words) or (0, "")
        options = dict[str, object]()
        for name, value in (_flags if framework == "OpenRLHF" else _overrides)(words[start:]):
            options[option_name(name, framework)] = value
        found.append((run.execution, options))
    merged = dict[str, object]()
    others = {name for execution, options in found if not execution.is_first for name in options}
    for name in dict.fromkeys(name for execution, options in found if execution.is_first for name in options):
        if name not in others and (unknown := followed.unknown_in(name)):
            unreadable[followed.show(name)] = f"{unknown[0]} is not known; it may set any option"
            continue
        values = [(execution, options.get(name, _NOT_GIVEN)) for execution, options in found]
        first = values[0][1]
        if all(repr(value) == repr(first) for _, value in values):
            merged[name] = first
        else:
            merged[name] = _open(values, followed)
    assumed = [_circumstances(followed, given), *followed.assumptions]
    without = [run.execution for run in runs if site not in dict(run.commands)]
    if without:
        starts = [(execution, True) for execution, _ in found] + [(execution, False) for execution in without]
        assumed.append(f"The training starts at all: {_open(starts, followed).why}.")
    orphans = {
        " ".join(
            command.words
        ): f"line {command.line} runs it as a command of its own, so the training does not get it; "
        "the line before ends in no backslash, or is a comment"
        for command in followed.executions[0].commands
        if _ORPHAN.fullmatch(command.words[0])
    }
    return ScriptOptions(
        framework=framework, options=merged, unreadable={**unreadable, **orphans}, assumed=tuple(assumed)
    )


_NOT_GIVEN = Open("(not given)", "")


def _open(values: Sequence[tuple[Execution, object]], followed: Followed) -> Open:
    """Return the option whose value differs between runs, with what it depends on."""
    texts = {execution.decisions: _shown(value) for execution, value in values if execution.is_first}
    unknown = [name for text in texts.values() for name in followed.unknown_in(text)]
    # Each run turns one more decision than another one.
    turned = [at[-1] for at, text in texts.items() if at and text != texts.get(at[:-1], text)]
    depends = dict.fromkeys([*(followed.places[key] for key in turned), *unknown])
    why = f"it depends on {'; '.join(depends) or 'what is not known'}, which only the machine decides"
    # A program that prints nothing is tried, too, and says nothing.
    shown = dict.fromkeys(followed.show(text) for text in texts.values() if text)
    return Open(" or ".join(shown), why)


def _shown(value: object) -> str:
    return value.text if isinstance(value, Open) else str(value)


def _circumstances(followed: "Followed", given: Sequence[str]) -> str:
    """Say what the script is taken to be run with."""
    unset = [name for name in followed.unset if not name.isdigit()]
    parts = [
        f"with {' '.join(given)}" if given else "without arguments",
        *(["none of its variables set before"] * bool(unset)),
    ]
    names = f": {', '.join(unset)}" if unset else ""
    return f"The script is run {' and '.join(parts)}{names}."


def _nothing(path: Path, followed: "Followed", given: Sequence[str]) -> str:
    """Say why no command starts training."""
    pattern, options = _SLIME
    commands = [command.words for command in followed.executions[0].commands]
    if any(any(map(pattern.fullmatch, words)) and any(option in words for option in options) for words in commands):
        return f"{path}: starts slime or vime, which is not read; give a script of verl, OpenRLHF or LUFFY"
    ended = next((execution.ended for execution in followed.executions if execution.ended), "")
    if ended:
        return (
            f"{path}: no command that starts training is reached: {ended}. {_circumstances(followed, given)} Give what "
            "it needs after the file, as NAME=VALUE for variables"
        )
    remedy = "give the script that has it, or a YAML file"
    if followed.unset:
        remedy += f", or its variables after the file as NAME=VALUE ({', '.join(followed.unset)})"
    return (
        f"{path}: no command that starts training, such as python3 -m verl.trainer.main_ppo or "
        f"python3 -m openrlhf.cli.train_ppo_ray; {remedy}"
    )
