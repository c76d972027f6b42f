"""Read the options of a training run from the command that a shell script starts it with.

The script is followed, not run (`megarl.migrate.shell`). The conversion lists what only running it would tell.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from megarl.errors import ConfigError
from megarl.migrate.aliases import RENAMED, RENAMED_AS_HERE

if TYPE_CHECKING:
    from megarl.migrate.shell.worlds import Followed, World

# By the word that starts a run, its framework; the first that matches counts.
_LAUNCHERS: Mapping[str, str] = {
    r"\S*openrlhf\S*train_ppo\w*(\.py)?|(\S*[./])?train_ppo_ray(\.py)?": "OpenRLHF",
    r"(\S*[./])?main_mix_ppo(\.py)?": "LUFFY",
    r"(\S*[./])?main_(?!mix|eval|generation)\w+(\.py)?": "verl",
}
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
    options: Mapping[str, Any]
    unreadable: Mapping[str, str] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()


def option_name(name: str, framework: str) -> str:
    """Return the name that `aliases` uses for an option."""
    plain = name.lstrip("+~")
    if framework != "OpenRLHF":
        return plain
    plain = plain.replace("-", "_")
    return RENAMED.get(plain) or RENAMED_AS_HERE.get(plain) or plain


def _overrides(arguments: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield name and texts of Hydra arguments `name=value`. For others, such as `--config-name=X`, the name is the
    argument.
    """
    for argument in arguments:
        is_flag = argument.startswith("--")
        name, equals, text = (argument.lstrip("-") if is_flag else argument).partition("=")
        yield (f"hydra.{name}" if is_flag else name), [text] if equals else []


def _flags(arguments: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield name and texts of arguments `--name value ...`."""
    name: str | None = None
    texts: list[str] = []
    for argument in (*arguments, "--"):
        if not argument.startswith("--"):
            texts.append(argument)
            continue
        if name:
            yield name, texts
        name, equals, text = argument[2:].partition("=")
        texts = [text] if equals else []


def option_value(text: str) -> Any:
    """Parse a value as YAML, or keep it as text if it is not YAML. `None` and `1e-6` mean what they mean in Python."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if value == "None":
        return None
    if isinstance(value, str) and re.fullmatch(r"[-+]?[\d.]+[eE][-+]?\d+", value):
        return float(value)
    return value


def _launcher(words: Sequence[str]) -> tuple[int, str] | None:
    """Return the index after the word that starts training, and its framework."""
    for index, word in enumerate(words):
        for launcher, framework in _LAUNCHERS.items():
            if re.fullmatch(launcher, word):
                return index + 1, framework
    return None


def read_script(path: Path, given: Sequence[str], command: int | None) -> ScriptOptions:
    """Return the options of the command in a script that starts training; raise ConfigError if there is none.

    given: variables of the environment as NAME=VALUE, and arguments of the script. command: which of several, from 1.
    """
    from megarl.migrate.shell.worlds import follow

    if not path.is_file():
        raise ConfigError(f"{path}: no such file; give a shell script or a YAML file of verl, OpenRLHF or LUFFY")
    variables = {match[1]: match[2] for each in given if (match := _VARIABLE.fullmatch(each))}
    arguments = [each for each in given if not _VARIABLE.fullmatch(each)]
    followed = follow(path, lambda words: _launcher(words) is not None, variables=variables, arguments=arguments)
    # A world that fails before training is none of a run.
    worlds = [world for world in followed.worlds if world.commands or not world.status]
    sites = _sites(worlds, followed.holes.show)
    if not sites:
        raise ConfigError(_nothing(path, followed, given))
    if command is None and len(sites) > 1:
        lines = "; ".join(f"{number}: line {site[0]}" for number, site in enumerate(sites, 1))
        raise ConfigError(f"{path}: {len(sites)} commands start training ({lines}); choose one with --command NUMBER")
    if command is not None and not 1 <= command <= len(sites):
        raise ConfigError(f"--command={command}: {path} has {len(sites)} commands that start training")
    site = sites[(command or 1) - 1]
    return _merged(worlds, site, followed, given)


def _sites(worlds: Sequence["World"], show: Callable[[str], str]) -> list[tuple[int, int]]:
    """Return the commands of all worlds, each as its line and its number among those of that line, without repeats."""
    sites: dict[tuple[int, int], None] = {}
    for world in worlds:
        seen: dict[tuple[str, ...], None] = {}
        for index, command in enumerate(world.commands):
            words = tuple(show(word) for word, _ in command.words)
            if words not in seen:
                number = sum(each.line == command.line for each in world.commands[:index])
                sites[command.line, number] = None
            seen[words] = None
    return sorted(sites)


def _merged(
    worlds: Sequence["World"], site: tuple[int, int], followed: "Followed", given: Sequence[str]
) -> ScriptOptions:
    """Return the options on which all worlds agree; the others are `Open`."""
    line, number = site
    found: list[tuple[World, dict[str, Any]]] = []
    framework, unreadable = "", {}
    for world in worlds:
        commands = [command for command in world.commands if command.line == line]
        if len(commands) <= number:
            continue
        words = [word for word, _ in commands[number].words]
        start, framework = _launcher(words) or (0, "")
        options = dict[str, Any]()
        for name, texts in (_flags if framework == "OpenRLHF" else _overrides)(words[start:]):
            holes = followed.holes.within(" ".join(texts))
            shown = [followed.holes.show(text) for text in texts]
            if named := followed.holes.within(name):
                unreadable[followed.holes.show(name)] = f"{named[0].why}; it may set any option"
            elif holes:
                options[option_name(name, framework)] = Open(" ".join(shown), holes[0].why)
            else:
                values = [option_value(text) for text in texts]
                options[option_name(name, framework)] = values[0] if len(values) == 1 else values or True
        found.append((world, options))
    merged = dict[str, Any]()
    for name in dict.fromkeys(name for _, options in found for name in options):
        values = [(world, options.get(name, _NOT_GIVEN)) for world, options in found]
        first = values[0][1]
        if all(value == first and type(value) is type(first) for _, value in values):
            merged[name] = first
        else:
            merged[name] = Open(" or ".join(dict.fromkeys(_shown(value) for _, value in values)), _depends(values))
    starts = [(world, any(world is each for each, _ in found)) for world in worlds]
    assumed = [_circumstances(followed, given), *followed.assumptions]
    if not all(value for _, value in starts):
        assumed.append(f"The training starts at all: {_depends(starts)}.")
    return ScriptOptions(framework=framework, options=merged, unreadable=unreadable, assumed=tuple(assumed))


_NOT_GIVEN = Open("(not given)", "")


def _shown(value: Any) -> str:
    return value.text if isinstance(value, Open) else str(value)


def _depends(values: Sequence[tuple["World", Any]]) -> str:
    """Name the conditions on which a value depends."""
    conditions = dict.fromkeys(condition for world, _ in values for condition, _ in world.decisions)

    def having(condition: str, outcome: bool) -> set[str]:
        return {_shown(value) for world, value in values if (condition, outcome) in world.decisions}

    named = [each for each in conditions if having(each, True) != having(each, False)]
    return f"it depends on {'; '.join(named or conditions)}, which only the machine decides"


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
    ended = next((world.ended for world in followed.worlds if world.ended), "")
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
