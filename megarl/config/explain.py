"""Explain and find configuration keys, and list them for completion in a shell."""

import re
import textwrap
from collections.abc import Iterator
from functools import reduce
from pathlib import Path

from megarl.config.document import Entry, entries, entries_of
from megarl.config.load import PACKAGED, masked_config, read_yaml
from megarl.config.parse import Tree, from_dict
from megarl.config.part_settings import BESIDE, use_plugins_of, value_of
from megarl.config.plugins import SETTINGS, registrations
from megarl.config.schema import Config
from megarl.errors import ConfigError
from megarl.host.unicode import visible

_WIDTH = 100


def explain(key: str, config: Config | None = None) -> str:
    """Return what a key means, which values it takes, and its value in `config`; for a section, a line for each key.

    Entries of lists and mappings are found under any place or name, as in `environment.entries.weather.type`, and those
    that plugins of `config` declare. Raises ConfigError with a suggestion for an unknown key.
    """
    own = _declared(config) if config else {}
    known = [*entries(), *own]
    for entry in known:
        if _pattern(entry.key).fullmatch(key):
            if config is None:
                return _describe(entry)
            unset = entry.default.strip("`") if entry in own else "not set"
            value = value_of(masked_config(config), own.get(entry, key), unset=unset)
            return f"{_describe(entry)}\n  here     {visible(str(value))}"
    within = [entry for entry in known if _pattern(entry.key.rpartition(".")[0]).fullmatch(key)]
    depth = key.count(".") + 1
    deeper = sorted({".".join(e.key.split(".")[: depth + 1]) for e in known if e.key.startswith(f"{key}.")})
    sections = [name for name in deeper if name not in {entry.key for entry in within}]
    if not within and not sections:
        # The parser's own error names what a run file may have meant.
        from_dict(Config, reduce(lambda inner, name: {name: inner}, reversed(key.split(".")), None))  # type: ignore[arg-type]
        raise ConfigError(f"unknown key '{key}'")
    width = max([0, *(len(entry.key) for entry in within)])
    lines = [f"{e.key:<{width}}  {textwrap.shorten(e.description, _WIDTH, placeholder=' …')}".rstrip() for e in within]
    return "\n".join([*lines, *(f"{name}.…" for name in sections)])


def _declared(config: Config) -> dict[Entry, str]:
    """Return the settings that the parts of plugins declare, each with the key that holds its value."""
    use_plugins_of(config)
    found = dict[Entry, str]()
    for part, name in ((each, name) for each in registrations() if each.own for name in each.names):
        beside = [key.rpartition(".")[0] for key in BESIDE if value_of(config, key) == name]
        for section in (f"{SETTINGS}.{name}", *beside):
            of_part = entries_of(part.own.declared, section, None) if part.own else ()
            found |= {entry: f"{SETTINGS}.{name}.{entry.key.rpartition('.')[2]}" for entry in of_part}
    return found


def search(words: str) -> list[str]:
    """Return a line for every key, file of configs/ and metric in whose name or meaning all of the words occur.

    Raises ConfigError if there are none.
    """
    known = [
        *((entry.key, entry.description) for entry in entries()),
        *((f"use.{path.parent.name}={path.stem}", _about(path)) for path in sorted(PACKAGED.glob("*/*.yaml"))),
        *((names, meaning) for _, metrics in metric_sections() for names, meaning in metrics["metrics"].items()),
    ]
    asked = words.lower().split()
    found = [f"{name}  {meaning}" for name, meaning in known if all(w in f"{name} {meaning}".lower() for w in asked)]
    if not found:
        raise ConfigError(f"--search: no setting, file of configs/ or metric has {words!r}; try a part of the word")
    return found


def metric_sections() -> Iterator[tuple[str, Tree]]:
    """Yield the title of each group of metrics, with `about` it and its `metrics`: meanings by names."""
    yield from read_yaml(Path(__file__).with_name("metrics.yaml")).items()


def _about(path: Path) -> str:
    """Return the first comment of a file of configs/ that is for readers, not for their editors."""
    comments = re.findall(r"^# (?!yaml-language-server)(.*)", path.read_text(encoding="utf-8"), re.MULTILINE)
    return next(iter(comments), "")


def complete_key(prefix: str, **_: object) -> list[str]:
    """Return the keys that begin with `prefix`, for argcomplete, which passes further arguments by name."""
    return [entry.key for entry in entries() if entry.key.startswith(prefix)]


def complete_override(prefix: str, **_: object) -> list[str]:
    """Return what an override that begins with `prefix` may become: `key=`, or `key=value` where values have names."""
    key, equals, _value = prefix.partition("=")
    groups = {f"use.{group.name}": group for group in PACKAGED.iterdir() if group.is_dir()}
    if not equals:
        return [f"{name}=" for name in (*(g for g in groups if g.startswith(key)), *complete_key(key))]
    if key in groups:
        return [f"{key}={path.stem}" for path in sorted(groups[key].glob("*.yaml"))]
    expects = next((entry.expects for entry in entries() if entry.key == key), "")
    words = ["true", "false"] if expects.startswith("true or false") else re.findall(r"'([^']*)'", expects)
    return [f"{key}={word}" for word in words]


def _describe(entry: Entry) -> str:
    meaning = textwrap.wrap(entry.description, _WIDTH) or ["(no description)"]
    expects = entry.expects.replace("\\|", "|")
    return "\n".join(
        [
            entry.key,
            *(f"  {line}" for line in meaning),
            f"  expects  {expects}",
            f"  default  {entry.default.strip('`')}",
        ]
    )


def _pattern(key: str) -> re.Pattern[str]:
    """Return an expression for a documented key, in which NAME stands for any name and [i] for any place of a list."""
    return re.compile(re.escape(key).replace("NAME", r"[^.]+").replace(r"\[i\]", r"\[(?:i|\d+)\]"))
