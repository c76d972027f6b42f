"""Write the key reference and the JSON schema of configurations.

`python -m megarl.config.document` writes docs/configuration.md, for people, and docs/config.schema.json, with which
editors check and complete run files.
"""

import ast
import inspect
import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from math import inf
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from megarl.config import support
from megarl.config.parse import Tree, describe_type
from megarl.config.schema import Config
from megarl.config.setting import Allowed, Range, allowed_by
from megarl.host.streams import print_lines

PAGE = Path("docs/configuration.md")
JSON_SCHEMA = Path("docs/config.schema.json")
COMMAND = "python -m megarl.config.document"
HEADER = f"""# Configuration

Written by `{COMMAND}` from the classes of `megarl/config/`; edit those instead. The same
command writes `docs/config.schema.json`, a JSON schema with which editors check and complete run files. A run file
names it in its first line: `# yaml-language-server: $schema=../../docs/config.schema.json`.

A run file in `configs/run/`, or anywhere else, names a model and an algorithm and sets what differs from them. A name
such as `qwen3-8b` is looked up in `../model/`, seen from the run file's directory, and then among the files that come
with megarl. Settings below `for_algo: {{NAME: …}}` hold only for algorithm files of that name, in which `*` stands for
anything. `key=value` on the command line overrides the run file. Unknown keys, wrong types and values out of range are
errors, which `megarl train CONFIG --dry-run` reports without starting anything. Paths are relative to the working
directory. Values are those of YAML 1.2: `1e-6` is a number, `010` and dates are texts. No other setting is inserted
into one, as `${{run.seed}}` would say to Hydra. The suffixes `_tokens`, `_s`, `_mib`, `_gib`, `_nats` and `_frac` give
a key's unit; keys that start with `num_` are counts.
"""
_JSON_TYPES: Mapping[object, str] = {bool: "boolean", int: "integer", float: "number", str: "string", NoneType: "null"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One key of the reference: its name, the values it takes, its default and its meaning."""

    key: str
    expects: str
    default: str
    description: str


def render() -> str:
    """Return the text of docs/configuration.md."""
    parts = [HEADER]
    for section, cls, allowed in _sections(Config, ""):
        parts.append(f"## {section}\n\n{_summary(cls)}\n")
        own = entries_of(cls, section, allowed)
        if rows := [f"| `{e.key}` | {e.expects} | {e.default} | {e.description} |" for e in own]:
            parts.append("\n".join(["| key | expects | default | meaning |", "|---|---|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def entries() -> list[Entry]:
    """Return every key of the schema, in the order of docs/configuration.md."""
    return [entry for section, cls, allowed in _sections(Config, "") for entry in entries_of(cls, section, allowed)]


def render_json_schema() -> str:
    """Return the text of docs/config.schema.json: a JSON schema (draft 2020-12) of the files below configs/.

    The schema omits rules that relate several keys. It also omits spellings that only megarl's parser accepts, such as
    `yes` in quotation marks for true.
    """
    tree = _object_schema(Config, None)
    use = {
        "type": "object",
        "description": "In run files: the files to build upon by group, as in {model: qwen3-tiny, algo: grpo}; a "
        "name in ../GROUP or in configs/GROUP of megarl, or a path that ends in .yaml.",
        "additionalProperties": {"type": "string"},
    }
    for_algo = {
        "type": "object",
        "description": "In run files: settings that hold only with some algorithm files, by the file's name; a * in "
        "it stands for anything, as in {ppo*: {critic: {freeze: true}}}.",
        "additionalProperties": {"$ref": "#"},
    }
    tree["properties"] = {"use": use, "for_algo": for_algo, **tree["properties"]}
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "megarl configuration", **tree}
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def _object_schema(cls: type, default: Allowed | None) -> Tree:
    """Describe a section as JSON schema; numbers without a range of their own have the range `default`."""
    hints, comments = get_type_hints(cls), _comments(cls)
    properties = {}
    for field in fields(cls):
        schema = _value_schema(hints[field.name], allowed_by(field, default))
        if field.name in comments:
            schema["description"] = comments[field.name]
        if field.default is not MISSING:
            schema["default"] = field.default
        properties[field.name] = schema
    required = [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]
    return {
        "type": "object",
        "description": _summary(cls),
        "properties": properties,
        **({"required": required} if required else {}),
        "additionalProperties": False,
    }


def _value_schema(hint: object, allowed: Allowed | None) -> Tree:
    """Describe the values of a type as JSON schema; `allowed` is the range of the numbers among them."""
    args, origin = get_args(hint), get_origin(hint)
    if hint is Any:
        return {}
    if is_dataclass(hint):
        return _object_schema(cast(type, hint), allowed)
    if origin in (UnionType, Union):
        return {"anyOf": [_value_schema(arg, allowed) for arg in args]}
    if origin is Literal:
        return {"enum": list(args)}
    if origin is Mapping:
        return {"type": "object", "additionalProperties": _value_schema(args[1], allowed)}
    if origin is tuple:
        size = {} if Ellipsis in args else {"minItems": len(args), "maxItems": len(args)}
        return {"type": "array", "items": _value_schema(args[0], allowed), **size}
    schema: Tree = {"type": _JSON_TYPES[hint]}
    if hint not in (int, float) or not isinstance(allowed, Range):
        return schema
    bounds = {
        "minimum": allowed.at_least,
        "exclusiveMinimum": allowed.above,
        "maximum": allowed.at_most,
        "exclusiveMaximum": allowed.below,
    }
    schema |= {name: bound for name, bound in bounds.items() if abs(bound) != inf}
    if allowed.never is not None:
        schema["not"] = {"const": allowed.never}
    return schema if allowed.also is None else {"anyOf": [schema, {"const": allowed.also}]}


def _sections(cls: type, path: str, default: Allowed | None = None) -> Iterator[tuple[str, type, Allowed | None]]:
    """Yield the name, class and default range of every section (parents first) and of records in lists and mappings."""
    hints = get_type_hints(cls)
    for field in fields(cls):
        hint, allowed, section = hints[field.name], allowed_by(field, default), f"{path}{field.name}"
        if is_dataclass(hint):
            yield section, cast(type, hint), allowed
            yield from _sections(cast(type, hint), f"{section}.", allowed)
        elif get_origin(hint) in (Mapping, tuple):
            # A tuple's items may be of a plain type or a record.
            items = [kind for item in get_args(hint) for kind in (item, *get_args(item))]
            place = ".NAME" if get_origin(hint) is Mapping else "[i]"
            yield from ((f"{section}{place}", cast(type, kind), allowed) for kind in items if is_dataclass(kind))


def entries_of(cls: type, section: str, default: Allowed | None) -> Iterator[Entry]:
    """Yield the keys of a section that are not sections themselves."""
    hints, comments = get_type_hints(cls), _comments(cls)
    for field in fields(cls):
        if is_dataclass(hints[field.name]):
            continue
        allowed = allowed_by(field, default)
        expects = describe_type(hints[field.name]) + (f"; {allowed.expected}" if allowed else "")
        # A | would end the table's cell.
        yield Entry(
            key=f"{section}.{field.name}",
            expects=expects.replace("|", "\\|"),
            default=_default(field),
            description=comments.get(field.name, "").replace("|", "\\|"),
        )


def _default(field: Field[object]) -> str:
    """Return a field's default as YAML, for a table cell."""
    value = {} if field.default_factory is dict else field.default
    if value is MISSING:
        return "required"
    if isinstance(value, str) and value:
        return f"`{value}`"
    return f"`{json.dumps(value) if not isinstance(value, float) else value}`"


def _summary(cls: type) -> str:
    """Return a class's docstring on one line."""
    return " ".join((inspect.getdoc(cls) or "").split())


@cache
def _comments(cls: type) -> dict[str, str]:
    """Return the comments above and beside each field, inherited ones included, by the field's name."""
    found: dict[str, str] = {}
    for owner in filter(is_dataclass, reversed(cls.__mro__)):
        lines = Path(inspect.getfile(owner)).read_text(encoding="utf-8").splitlines()
        tree = ast.parse("\n".join(lines))
        node = next(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == owner.__name__)
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                above: list[str] = []
                at = statement.lineno - 2
                while lines[at].lstrip().startswith("#"):
                    above.insert(0, lines[at].strip().removeprefix("#").strip())
                    at -= 1
                beside = lines[(statement.end_lineno or 0) - 1][statement.end_col_offset :].partition("#")[2].strip()
                found[statement.target.id] = " ".join([*above, beside]).strip()
    return found


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
    JSON_SCHEMA.write_text(render_json_schema(), encoding="utf-8")
    support.PAGE.write_text(support.with_table(support.PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print_lines(f"wrote {PAGE}, {JSON_SCHEMA} and the table of {support.PAGE}")
