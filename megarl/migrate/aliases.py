"""Map option names of verl, OpenRLHF, LUFFY and others to megarl's keys, for error messages and for convert-config.

The tables are the files `peers/*.yaml`, one for each framework:

- `options`: for each option, the megarl key that corresponds to it, or a mapping with `key` (several keys are separated
  by spaces; none if nothing is to be set), `note` (what differs, or why nothing is to be set) and `rule` (one of
  `rules`, which translates the option's values);
- `defaults`: values that a run relies on without naming them; `same`: options that are called alike here;
- `renamed`: newer names of options; `renamed_as_here`: those of them that are keys here;
- `not_supported`, `needless`: patterns of options without a key here, each with the reason. `*` stands for any text.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from megarl.config.load import read_yaml
from megarl.errors import ConfigError, UnknownKeyError, did_you_mean
from megarl.migrate import translate  # noqa: F401 - registers its rules
from megarl.migrate.rules import RULES, UNSET, Rule


@dataclass(frozen=True, slots=True)
class Alias:
    """An option of another framework, with the megarl keys that correspond to it.

    `key`: these keys, separated by spaces; empty if nothing is to be set. `note`: what differs, or why nothing is to be
    set. `rule`: translates the option's values (see `rules`); None keeps them. `unsupported`: the option asks for
    something that megarl does not have.
    """

    framework: str
    key: str
    note: str = ""
    rule: Rule | None = field(default=None, compare=False)
    unsupported: bool = False

    @property
    def advice(self) -> str:
        """Return the text that an error message puts after the name of the unknown key."""
        if self.unsupported:
            return f"of {self.framework}, asks for what is not supported here: {self.note}"
        name = " and ".join(repr(key) for key in self.key.split())
        here = f"{self.framework}'s name for {name}" if name else f"of {self.framework}"
        return f"{here}{f' ({self.note})' if self.note else ''}"


def _alias(framework: str, entry: str | Mapping[str, Any]) -> Alias:
    if isinstance(entry, str):
        return Alias(framework, entry)
    rule = entry.get("rule")
    if isinstance(rule, Mapping):
        ((name, arguments),) = rule.items()
        rule = partial(RULES.get(name), **_with_unset(arguments))
    elif rule is not None:
        rule = RULES.get(rule)
    return Alias(framework, entry.get("key", ""), entry.get("note", ""), rule)


def _with_unset(value: object) -> Any:
    """Return a value of a table with `UNSET` wherever the table says `unset`."""
    if isinstance(value, Mapping):
        return {key: _with_unset(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_unset(item) for item in value]
    return UNSET if value == "unset" else value


def _table(name: str) -> Mapping[str, Any]:
    return read_yaml(Path(__file__).with_name("peers") / f"{name.lower().replace(' ', '_')}.yaml")


# In the order in which they are asked.
_TABLES = {
    name: _table(name)
    for name in (
        *("verl", "PPO_critic", "CPO", "LUFFY", "OpenRLHF", "PEFT", "TRL", "ms-swift", "NeMo-RL", "SkyRL", "miles"),
        *("prime-rl", "tinker", "vLLM", "earlier versions"),
    )
}
_FLAT: Mapping[str, Alias] = {
    option: _alias(framework, entry)
    for framework, table in _TABLES.items()
    for option, entry in table["options"].items()
}
# OpenRLHF's names before 0.11, by those since; and those since that are keys here and mean the same.
RENAMED: Mapping[str, str] = _TABLES["OpenRLHF"]["renamed"]
RENAMED_AS_HERE: Mapping[str, str] = _TABLES["OpenRLHF"]["renamed_as_here"]
# Names of verl that are the same here and mean the same.
SAME = frozenset(_TABLES["verl"]["same"])
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "verl": _TABLES["verl"]["defaults"],
    "LUFFY": {**_TABLES["verl"]["defaults"], **_TABLES["LUFFY"]["defaults"]},
    "OpenRLHF": _TABLES["OpenRLHF"]["defaults"],
}
ALIASES: Mapping[str, Alias] = {**_FLAT, **{new: _FLAT[name] for new, name in RENAMED.items()}}

# Options without a key here, by pattern; features that do not exist precede what merely needs no setting.
ABSENT: Mapping[str, Alias] = {
    pattern: Alias(framework, "", group["why"], unsupported=kind == "not_supported")
    for kind in ("not_supported", "needless")
    for framework, table in _TABLES.items()
    for group in table.get(kind, ())
    for pattern in group["options"]
}


def find_alias(path: str, value: object = None) -> tuple[str, Alias] | None:
    """Look up an unknown dotted key among other frameworks' options; return the option's name and `Alias`, or None.

    If `value` is a mapping, all keys in it are looked up. The first sections of a name may be missing if the rest has
    only one meaning: `rollout.n` is found as verl's `actor_rollout_ref.rollout.n`. Hydra's `+` before a name is
    ignored. An alias for one value, such as `algorithm.adv_estimator=cpo`, has priority over the alias for the key;
    patterns of options without a megarl key come last.
    """
    for leaf, item in leaves(path.lstrip("+"), value):
        for name in (f"{leaf}={item}", leaf):
            if name in ALIASES:
                return name, ALIASES[name]
            found = {alias for known, alias in ALIASES.items() if "." in leaf and known.endswith(f".{name}")}
            if len(found) == 1:
                return name, found.pop()
        for pattern, alias in ABSENT.items():
            if fnmatchcase(leaf, pattern):
                return leaf, alias
    return None


def explain_option(option: str) -> list[str]:
    """Return what another trainer's option is here, a line for each option that ends so; FRAMEWORK: may precede it.

    Raises ConfigError if the tables have none.
    """
    framework, _, name = option.rpartition(":")
    name = name.lstrip("+-").partition("=")[0] if name.startswith("-") else name.lstrip("+")
    asked = {each: alias for each, alias in ALIASES.items() if framework.lower() in ("", alias.framework.lower())}
    spelled = (name, name.replace("-", "_"))
    found = {k: a for k, a in asked.items() if k in spelled or k.endswith(f".{name}") or k.startswith(f"{name}=")}
    found = found or {
        pattern: alias
        for pattern, alias in ABSENT.items()
        if framework.lower() in ("", alias.framework.lower()) and any(fnmatchcase(each, pattern) for each in spelled)
    }
    if not found and name in SAME:
        return [f"{name}: called so here, too"]
    if not found:
        advice = did_you_mean(name, asked) or f"name one of {', '.join(_TABLES)} before a colon"
        raise ConfigError(f"explain-option: no table has {option!r}; {advice.strip()}")
    return [f"{each}: {alias.advice}" for each, alias in found.items()]


def answered(error: UnknownKeyError) -> ConfigError:
    """Return the error of an unknown key with the key's meaning if it is an option of another framework."""
    found = find_alias(error.key, error.value)
    return ConfigError(f"unknown key '{found[0]}', {found[1].advice}") if found else error


def unknown_options(arguments: list[str], known: Collection[str] = ()) -> str:
    """Return the message for command-line options that do not exist, such as `--micro_train_batch_size 4`.

    known: those that the command has.
    """
    names = [argument.lstrip("-").partition("=")[0] for argument in arguments if argument.startswith("-")]
    hints = [f"--{name} is {found[1].advice}" for name in names if (found := find_alias(name.replace("-", "_")))]
    if not {"c", "cfg", "config", "config-file", "config_file"}.isdisjoint(names):
        hints.append("a run file is given by its path alone")
    hints += [near.strip() for name in names if (near := did_you_mean(f"--{name}", known))]
    advice = f"; {'; '.join(hints)}" if hints else ""
    return f"unrecognized arguments: {' '.join(arguments)}{advice}; settings are given as key=value"


def leaves(path: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield the dotted name and the value of every leaf of a nested mapping; an empty mapping is a leaf too."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from leaves(f"{path}.{key}" if path else str(key), item)
    else:
        yield path, value
