"""Read the options of a training run of verl, OpenRLHF or LUFFY from its shell script or YAML file."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megarl.config.load import read_yaml
from megarl.errors import ConfigError
from megarl.migrate.aliases import ALIASES, leaves
from megarl.migrate.hydra_values import option_value
from megarl.migrate.peer_scripts import Open, ScriptOptions, option_name, read_script

_INTERPOLATION = re.compile(r"\$\{(?:oc\.select:)?([A-Za-z_]\w*(?:\.\w+)+)(?:,([^${}]*))?\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOptions:
    """The options of one training run of another framework, under the names that `aliases` uses.

    `unreadable`: options whose value the file does not tell, as written there, each with the reason. `undecided`: the
    names of these. `assumed`: what the values rest on.
    """

    framework: str
    options: Mapping[str, object]
    unreadable: Mapping[str, str]
    undecided: frozenset[str] = field(default_factory=frozenset)
    assumed: tuple[str, ...] = ()


def read_peer_file(
    path: Path, given: Sequence[str] = (), command: int | None = None, *, run_anyway: bool = False
) -> PeerOptions:
    """Read the options from a YAML file, or from the command in a shell script that starts training.

    given: what a script is run with: variables of the environment as NAME=VALUE, and arguments. command: which of
    several commands that start training, from 1. run_anyway: run a script also where there is no sandbox for it.
    """
    if path.suffix in (".yaml", ".yml"):
        if given or command:
            raise ConfigError(f"{path}: {' '.join(given) or '--command'} is for shell scripts, and this is a YAML file")
        tree = read_yaml(path)
        is_verl = any(section in tree for section in ("actor_rollout_ref", "algorithm", "trainer"))
        framework = "verl" if is_verl else "OpenRLHF"
        found = {
            option_name(name, framework): _number(value) if isinstance(value, str) else value
            for name, value in leaves("", tree)
        }
        script = ScriptOptions(framework=framework, options=found)
    else:
        script = read_script(path, given, command, run_anyway=run_anyway)
    framework = script.framework
    if framework == "verl" and any(name in ALIASES and ALIASES[name].framework == "LUFFY" for name in script.options):
        framework = "LUFFY"
    resolved = {name: _resolve(value, script.options) for name, value in script.options.items()}
    undecided = {name: value for name, value in resolved.items() if isinstance(value, Open)}
    undecided |= {
        name: Open(value, "the file does not say what it stands for")
        for name, value in resolved.items()
        if isinstance(value, str) and "${" in value
    }
    return PeerOptions(
        framework=framework,
        options={name: value for name, value in resolved.items() if name not in undecided},
        unreadable={**{f"{name}={value.text}": value.why for name, value in undecided.items()}, **script.unreadable},
        undecided=frozenset(undecided),
        assumed=script.assumed,
    )


def _number(text: str) -> str | float:
    """Read 1e-6 as a number, as OmegaConf does in YAML files."""
    return float(text) if re.fullmatch(r"[-+]?[\d.]+[eE][-+]?\d+", text) else text


def _resolve(value: object, options: Mapping[str, object]) -> object:
    """Replace references such as ${data.max_prompt_length} to options of the same file, where those are known."""
    for _ in range(len(options)):
        if not isinstance(value, str) or (found := _INTERPOLATION.search(value)) is None:
            return value
        if found[1] not in options and found[2] is None:
            return value
        target = options.get(found[1], option_value(found[2] or ""))
        if isinstance(target, Open):
            return Open(value, f"{found[1]}: {target.why}")
        value = target if found[0] == value else value.replace(found[0], str(target))
    return value
