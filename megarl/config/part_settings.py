"""Read and check the settings that plugins declare for the parts that they register.

`algo.settings` has them by a part's name. A run file or an override may also write them where the part is chosen:
`algo.policy_loss.width`, beside `algo.policy_loss.name`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from megarl.config.parse import Tree, from_dict
from megarl.config.plugins import KEY, SETTINGS, activate, active_plugins, registrations, use_plugins
from megarl.config.schema import Config
from megarl.config.setting import check_values
from megarl.errors import ConfigError
from megarl.registry import Registration, unknown_name

# The settings that choose a part whose own settings may stand beside them.
BESIDE = (
    "algo.advantage.estimator",
    "algo.policy_loss.name",
    "algo.correction.name",
    "algo.kl.estimator",
    "algo.demonstrations.strategy",
    "algo.off_policy.reshape",
    "train_preference.objective",
)


@dataclass(frozen=True)
class _NoSettings:
    """Stands for the settings of a part that declares none."""


def value_of(config: object, key: str, *, unset: object = None) -> Any:
    """Return the value of a setting, or of a tree, by its dotted key, as `a.b[0]`; `unset` if there is none."""
    value: Any = config
    for name in key.replace("[", ".").replace("]", "").split("."):
        try:
            if isinstance(value, Mapping):
                value = value[name]
            else:
                value = value[int(name)] if isinstance(value, tuple) else getattr(value, name)
        except (KeyError, IndexError, ValueError, AttributeError):
            return unset
    return value


def chosen_by(config: object, key: str) -> tuple[Any, ...]:
    """Return the names that a setting chooses."""
    value = value_of(config, key)
    return value if isinstance(value, tuple) else (value,)


def gathered(tree: Tree, whole: Mapping[str, object]) -> Tree:
    """Move what the sections of parts do not know to `algo.settings`; `whole` says which parts and plugins are chosen.

    Without plugins nothing moves, so that an unknown key is refused where it stands.
    """
    if not value_of(whole, KEY):
        return tree
    for key in BESIDE:
        section, _, _ = key.rpartition(".")
        given, default = value_of(tree, section), value_of(Config(), section)
        known = {each.name for each in fields(default)}
        own = {name: given[name] for name in given if name not in known} if isinstance(given, dict) else {}
        part, already = value_of(whole, key) or value_of(Config(), key), value_of(tree, SETTINGS) or {}
        beside = value_of(already, str(part)) or {}
        if not own or not all(isinstance(each, dict) for each in (already, beside)):
            continue  # the parser tells of a wrong type
        for name, value in own.items():
            there = beside.get(name, value)
            if there != value:
                other = f"{SETTINGS}.{part}.{name}"
                raise ConfigError(f"{section}.{name}: got {value!r}, but {other} is {there!r}; set one")
        rest = {name: value for name, value in given.items() if name in known}
        tree = _with(tree, section, rest)
        tree = _with(tree, SETTINGS, {**already, str(part): {**beside, **own}})
    return tree


def _with(tree: Tree, key: str, value: object) -> Tree:
    name, _, inner = key.partition(".")
    return {**tree, name: _with(tree.get(name, {}), inner, value) if inner else value}


def use_plugins_of(config: Config) -> None:
    """Have the parts of a run's plugins in force in this process, with the settings of the run.

    Raises ConfigError for plugins that cannot be used, and for settings that no chosen part declares or accepts.
    """
    use_plugins(config.algo.plugins)
    declaring: dict[str, Registration] = {}
    for each in registrations():
        for name in each.names if each.own else ():
            if declaring.setdefault(name, each) is not each:
                raise ConfigError(f"{KEY}: two parts with settings are called {name!r}; rename one")
    for name, given in config.algo.settings.items():
        _check(config, name, given, declaring)
    activate([replace(plugin, settings=config.algo.settings) for plugin in active_plugins()])


def _check(config: Config, name: str, given: Mapping[str, object], declaring: Mapping[str, Registration]) -> None:
    beside = next((key.rpartition(".")[0] for key in BESIDE if value_of(config, key) == name), None)
    path, part = beside or f"{SETTINGS}.{name}", declaring.get(name)
    if part is None and beside is None:
        raise unknown_name("part with settings", name, declaring, key=SETTINGS)
    if part:
        section = value_of(config, part.registry.key.rpartition(".")[0])
        chosen = [each for own in fields(section) for each in chosen_by(section, own.name)]
        if not any(each in chosen for each in part.names):
            raise ConfigError(f"{path}: is not read, as nothing chooses {name}; remove it, or set {part.registry.key}")
    beside_it = [f"{path}.{each.name}" for each in fields(value_of(config, beside))] if beside else []
    values: object = from_dict(part.own.declared if part and part.own else _NoSettings, given, path, beside_it)
    check_values(values, (path,), path)
