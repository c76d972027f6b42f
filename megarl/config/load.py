"""Build a `Config` from YAML files and dotted overrides.

A run file may build on other files, and then needs only the settings that differ:

    use: {model: qwen3-tiny, algo: grpo}        # configs/model/qwen3-tiny.yaml, configs/algo/grpo.yaml
    use: {run: sums-common, algo: ./my.yaml}    # another run file, and a path to any .yaml file

    for_algo: {ppo*: {critic: {freeze: true}}}  # only if the algorithm file has such a name

Names are looked up in the configs root (the parent of the run file's directory), and then among the files that come
with megarl. Paths, here and anywhere in a configuration, are relative to the current working directory, with `~` and
variables as in a shell; a run file that is not there, such as configs/run/sums-rl.yaml, is also looked for among those
files. Settings are merged in this order, and later ones win: the files that `use` names, one per group such as `model`;
the run files, base first, each followed by its `for_algo` settings; the overrides. A run file's `use` replaces that of
its base. Mappings merge key by key; any other value, including a list, is replaced.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from fnmatch import filter as filter_names
from fnmatch import fnmatch
from functools import reduce
from pathlib import Path
from typing import Any, cast

import yaml

from megarl.config.parse import Tree, from_dict
from megarl.config.part_settings import gathered
from megarl.config.schema import Config
from megarl.errors import ConfigError, DataError, did_you_mean
from megarl.host.masking import masked, masked_text
from megarl.host.paths import expanded
from megarl.host.reading import RESTORE, instead, reading

__all__ = ["compose", "dump", "from_dict", "load_config", "saved_config"]

# Limits of a YAML file; no smaller text can overflow the stack.
_MOST_LEVELS, _MOST_VALUES, _SMALL = 100, 1_000_000, 4000
# Settings that earlier versions wrote into runs and checkpoints, and that no longer have an effect.
_REMOVED = (("sync", "transport"),)

_PACKAGE = Path(__file__).resolve().parents[1]
# The files that come with megarl: within an installed package, beside the package in the source tree.
PACKAGED = _PACKAGE / "configs" if (_PACKAGE / "configs").is_dir() else _PACKAGE.parent / "configs"
# The schema of run files, which editors read, likewise.
SCHEMA = PACKAGED.parent / "docs" / "config.schema.json"


def load_config(run_file: Path, overrides: Sequence[str] = ()) -> Config:
    """Load a run file with overrides. Raises ConfigError for unknown keys and wrong types; values are not checked."""
    return from_dict(Config, compose(run_file, overrides))


def with_overrides(config: Config, overrides: Sequence[str]) -> Config:
    """Return a copy of a configuration with overrides of the form `dotted.key=value`; `use` is not allowed."""
    changes, before = _with_one_length(_parse_overrides(overrides)), asdict(config)
    if use := _take_use(changes, "overrides"):
        group = next(iter(use))
        raise ConfigError(f"override 'use.{group}': this command has no run file to use others; give their settings")
    return from_dict(Config, merge(before, gathered(changes, merge(before, changes))))


def overridden(overrides: Sequence[str]) -> frozenset[str]:
    """Return the dotted keys of the settings that overrides give, those within mappings too."""

    def leaves(tree: Tree, above: str) -> Iterator[str]:
        for name, value in tree.items():
            yield from leaves(value, f"{above}{name}.") if isinstance(value, dict) else (f"{above}{name}",)

    return frozenset(leaves(_parse_overrides(overrides), ""))


def saved_config(saved: Mapping[str, object]) -> Config:
    """Rebuild the configuration that a run or checkpoint saved, ignoring settings that have since been removed."""
    kept: Tree = {section: dict(value) if isinstance(value, Mapping) else value for section, value in saved.items()}
    for section, key in _REMOVED:
        kept.get(section, {}).pop(key, None)
    if "filter" in (algo := kept.get("algo", {})):
        # Filters judged rewards before algo.filter.by could choose.
        kept["algo"] = {**algo, "filter": {"by": "reward", **algo["filter"]}}
    return from_dict(Config, kept)


def masked_settings(config: Config) -> Tree:
    """Return a configuration as nested mappings, with secrets masked: what may be written anywhere."""
    settings: Tree = masked(asdict(config))
    return settings


def masked_config(config: Config) -> Config:
    """Return a configuration with secrets masked, as a saved one has them."""
    return from_dict(Config, masked_settings(config))


def dump(config: Config) -> str:
    """Return a configuration as YAML with every key; it loads back to an equal Config, but for masked secrets."""
    return yaml.safe_dump(masked_settings(config), sort_keys=False)


def compose(run_file: Path, overrides: Sequence[str] = ()) -> Tree:
    """Merge a run's files and overrides (see the module) into one mapping, not yet checked against the schema.

    An override is `dotted.key=value`, with the value read as YAML. `use.algo=cpo` chooses another algorithm file.
    """
    changes = _parse_overrides(overrides)
    run_file = Path(packaged(str(run_file)))
    group_files, bodies = _collect(run_file, _take_use(changes, "overrides"), ())
    groups = {path: read_yaml(path) for path in group_files.values()}
    if wrong := next((path for path, tree in groups.items() if "use" in tree), None):
        raise ConfigError(f"{wrong}: use: only run files may use others; name the files in the run file")
    algo = group_files.get("algo")
    layers = [layer for body in bodies for layer in (body, *_take_for_algo(body, algo))]
    tree: Tree = reduce(merge, map(_with_one_length, [*groups.values(), *layers, changes]), {})
    return gathered(tree, tree)


def _with_one_length(layer: Tree) -> Tree:
    """Let a number of steps replace a number of epochs that lower layers give. Raises ConfigError for both in one."""
    for name, section in layer.items():
        if not isinstance(section, dict) or (steps := section.get("total_steps")) is None:
            continue
        if (epochs := section.get("total_epochs")) is not None:
            raise ConfigError(f"{name}.total_epochs: got {epochs} beside {name}.total_steps={steps}; leave one out")
        layer = {**layer, name: {**section, "total_epochs": None}}
    return layer


def _take_for_algo(body: Tree, algo: Path | None) -> list[Tree]:
    """Remove `for_algo` from a run file's mapping. It maps names of algorithm files (or patterns such as `ppo*`) to
    settings; return the settings of each name that matches the chosen algorithm file.
    """
    choices = body.pop("for_algo", {})
    if not isinstance(choices, dict) or not all(isinstance(settings, dict) for settings in choices.values()):
        raise ConfigError(
            f"for_algo: got {masked(choices)!r}, expected settings by the name of an algorithm file, as in "
            "{ppo*: {critic: {freeze: true}}}"
        )
    roots = [PACKAGED / "algo"] if algo is None else [algo.parent, PACKAGED / "algo"]
    known = sorted({path.stem for root in roots for path in root.glob("*.yaml")})
    for pattern in choices:
        if not filter_names(known, str(pattern)):
            raise ConfigError(f"for_algo.{pattern}: no algorithm file has this name; there are: {', '.join(known)}")
    return [settings for name, settings in choices.items() if algo is not None and fnmatch(algo.stem, str(name))]


def merge(below: Tree, above: Tree) -> Tree:
    """Merge two mappings key by key, recursively; of two other values, the one from `above` wins."""
    merged = dict(below)
    for key, value in above.items():
        covered = merged.get(key)
        both = isinstance(covered, dict) and isinstance(value, dict)
        merged[key] = merge(cast(Tree, covered), value) if both else value
    return merged


def _parse_overrides(overrides: Sequence[str]) -> Tree:
    changes: Tree = {}
    for override in overrides:
        dotted, equals, text = override.partition("=")
        keys = dotted.strip().split(".")
        if not equals or not all(keys):
            got = masked_text(override)
            raise ConfigError(f"override {got!r}: expected key=value, such as actor.optimizer.lr=1e-5")
        try:
            value = _parse_yaml(text.encode())
        except ValueError as error:
            raise ConfigError(f"override of {dotted}: not valid YAML: {error}; quote the value") from error
        node = yaml.compose(text, Loader=_Loader)
        if "#" in text and (left := text[node.end_mark.index if node else 0 :].strip()):
            raise ConfigError(f"override of {dotted}: YAML takes {masked_text(left)!r} for a comment; quote the value")
        change = reduce(lambda nested, key: {key: nested}, reversed(keys), value)
        if masked(change) != change:
            raise ConfigError(
                f"override of {dotted}: has a secret, and every user of this host can read command lines; set it in "
                "the run file, or name an environment variable there, as with pass_env or api_key_env"
            )
        changes = merge(changes, change)
    return changes


def _collect(
    run_file: Path, use_overrides: Mapping[str, str], above: tuple[Path, ...]
) -> tuple[dict[str, Path], list[Tree]]:
    """Return the file that `use` names for each group (model, algo, …), and the run files with their contents, base
    first.

    above: the run files that led to this one, for detecting circular `use`.
    """
    if run_file.resolve() in above:
        raise ConfigError(f"{run_file}: builds upon itself; remove the circle of use.run")
    body = read_yaml(run_file)
    use = {**_take_use(body, str(run_file)), **use_overrides}
    # Not Path.parent: the parent of "." is "." again.
    root = Path(os.path.normpath(run_file.parent / ".."))
    files = {group: _used_file(root, group, name) for group, name in use.items()}
    base = files.pop("run", None)
    if base is None:
        return files, [body]
    base_files, base_bodies = _collect(base, {}, (*above, run_file.resolve()))
    return base_files | files, [*base_bodies, body]


def _take_use(tree: Tree, where: str) -> Mapping[str, str]:
    use = tree.pop("use", {})
    if not isinstance(use, dict) or not all(isinstance(name, str) for name in use.values()):
        raise ConfigError(f"{where}: use: got {use!r}, expected file names by group, as in {{algo: grpo}}")
    return use


def _used_file(root: Path, group: str, name: str) -> Path:
    if name.endswith((".yaml", ".yml")):
        path = Path(expanded(name, f"use.{group}"))
        _require_file(path, f"use.{group}: ")
        return path
    # The run file's own root may be that of the package, by another path.
    places = [root / group] if root.resolve() == PACKAGED else [root / group, PACKAGED / group]
    for place in places:
        if (path := place / f"{name}.yaml").is_file():
            return path
    there = sorted({path.stem for place in places for path in place.glob("*.yaml")})
    raise ConfigError(
        f"use.{group}: no file {name}.yaml in {' or '.join(map(str, places))}; {did_you_mean(name, there)}"
        f"there are: {', '.join(there) or 'none'}"
    )


def _require_file(path: Path, where: str) -> None:
    if os.path.lexists(path) and not path.is_dir():
        return
    above = path.absolute() if path.is_dir() else path.parent.absolute()
    if not above.is_dir():
        raise ConfigError(f"{where}no file {path}: the directory {above} does not exist; correct the path")
    there = sorted(p.name for p in above.iterdir() if p.suffix in (".yaml", ".yml"))
    near = did_you_mean(path.stem, [Path(name).stem for name in there])
    got = f"{path} is a directory, expected a file" if path.is_dir() else f"no file {path}"
    raise ConfigError(
        f"{where}{got}; {near}{above} has: {', '.join(there) or 'no YAML file; `megarl init DIR` writes one'}"
    )


def packaged(path: str) -> str:
    """Return `path`, or the file of this path that comes with megarl if the working directory has none."""
    beside = PACKAGED.parent / path
    return str(beside) if not Path(path).exists() and beside.exists() else path


def read_yaml(path: Path) -> Tree:
    """Read a YAML file that has a mapping or is empty. Raises ConfigError for other content or a repeated key."""
    _require_file(path, "")
    with reading(path, "valid YAML", remedy="correct it", error=ConfigError):
        tree = _parse_yaml(path.read_bytes())
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        expected = "a mapping of configuration keys"
        got = f"{path}: got a {type(tree).__name__}, expected {expected}; correct it"
        raise ConfigError(instead(path, expected) or got)
    return tree


def read_saved(path: Path) -> Tree:
    """Read the config.yaml that a run wrote; DataError if it is damaged."""
    with reading(path, "valid YAML", remedy=RESTORE):
        tree = _parse_yaml(path.read_bytes())
    if not isinstance(tree, dict):
        expected = "a mapping of sections"
        got = f"{path}: got a {type(tree).__name__}, expected {expected}; {RESTORE}"
        raise DataError(instead(path, expected, RESTORE) or got)
    return tree


def _parse_yaml(text: bytes) -> Any:
    """Parse one YAML document; ValueError says on one line what is wrong with it."""
    try:
        # libyaml would overflow the stack with brackets within brackets, thousands of them.
        depth = 0
        for event in yaml.parse(text, Loader=_Loader) if len(text) > _SMALL else ():
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _MOST_LEVELS:
                raise ValueError(f"it is nested in more than {_MOST_LEVELS} levels")
        tree = yaml.load(text, Loader=_UniqueKeyLoader)
    # PyYAML raises ValueError for text that only looks like a number, such as 0x_.
    except (yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error).split()).replace('in "<byte string>",', "at")
        if "cannot start any token" in reason and re.search(rb"^ *\t", text, re.MULTILINE):
            reason += ": YAML indents by spaces, and this is a tab"
        raise ValueError(reason) from error
    _require_finite(tree)
    return tree


def _require_finite(tree: object) -> None:
    """Raise ValueError if aliases (`*name`) make a value contain itself, or multiply it beyond all use."""
    count, waiting = 0, [(tree, 0)]
    while waiting:
        value, depth = waiting.pop()
        count += 1
        if depth > _MOST_LEVELS or count > _MOST_VALUES:
            raise ValueError("its aliases (*name) make a value that contains itself, or has millions of parts")
        children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        waiting += [(child, depth + 1) for child in children]


# YAML 1.1 reads 010 as 8, 1:30 as 90 and 2026-01-01 as a date.
_NUMBERS_NO_LONGER = re.compile(r"[-+]?0[\d_]+|[-+]?\d[\d_]*(:[0-5]?\d)+(\.[\d_]*)?|\d{4}-\d\d?-\d\d?([Tt\s].*)?")
# libyaml's parser is faster; a PyYAML built without it lacks this one.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _UniqueKeyLoader(_Loader):
    """A YAML loader that refuses duplicate keys, of which PyYAML would silently keep the last.

    Numbers and dates of YAML 1.1 alone stay texts.
    """

    def resolve(self, kind: type[yaml.Node], value: str, implicit: Any) -> str:
        is_text = kind is yaml.ScalarNode and implicit[0] and _NUMBERS_NO_LONGER.fullmatch(value)
        return str(yaml.resolver.BaseResolver.DEFAULT_SCALAR_TAG if is_text else super().resolve(kind, value, implicit))

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> object:
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.MarkedYAMLError(None, None, f"duplicate key {key.value!r}", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)
