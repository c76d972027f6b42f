"""docs/configuration.md, written from the schema: `python -m megarl.config.document`."""

import ast
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, cast, get_args, get_origin, get_type_hints

from megarl.config.parse import describe_type
from megarl.config.schema import Config
from megarl.config.setting import Range, range_of

PAGE = Path("docs/configuration.md")
COMMAND = "python -m megarl.config.document"
HEADER = f"""# Configuration

Written by `{COMMAND}` from the classes of `megarl/config/`; edit those instead.

A run file in `configs/run/` names a model and an algorithm and holds what differs; `key=value` on the command line
goes before it. Unknown keys, wrong types and values out of range are errors, and `megarl train CONFIG --dry-run` finds
them without starting anything. Paths are relative to the working directory. Names that end in `_tokens`, `_s`, `_mib`,
`_gib`, `_nats`, `_frac` say their unit; `num_` counts.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A line of the page."""

    key: str
    expects: str
    default: str
    description: str


def render() -> str:
    """The whole page."""
    parts = [HEADER]
    for section, cls, allowed in _sections(Config, ""):
        parts.append(f"## {section}\n\n{_one_line(cls)}\n")
        entries = list(_entries(cls, section, allowed))
        if entries:
            rows = [f"| `{e.key}` | {e.expects} | {e.default} | {e.description} |" for e in entries]
            parts.append("\n".join(["| key | expects | default | meaning |", "|---|---|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def entries() -> list[Entry]:
    """Every key of the schema."""
    return [entry for section, cls, allowed in _sections(Config, "") for entry in _entries(cls, section, allowed)]


def _sections(cls: type, path: str, default: Range | None = None) -> Iterator[tuple[str, type, Range | None]]:
    """Dotted name, class and default range of every section, parents first; then the records of lists and mappings."""
    hints = get_type_hints(cls)
    for field in fields(cls):
        hint, allowed = hints[field.name], range_of(field, default)
        if is_dataclass(hint):
            section = f"{path}{field.name}"
            yield section, cast(type, hint), allowed
            yield from _sections(cast(type, hint), f"{section}.", allowed)
        else:
            place = ".NAME" if get_origin(hint) is Mapping else "[i]"
            yield from ((f"{path}{field.name}{place}", record, allowed) for record in _records(hint))


def _records(hint: Any) -> list[type]:
    """Dataclasses within the type of a list or of a mapping."""
    if get_origin(hint) is Mapping:
        return [cast(type, kind) for kind in get_args(hint) if is_dataclass(kind)]
    items = get_args(hint)[:1] if get_origin(hint) is tuple else ()
    kinds = (kind for item in items if isinstance(item, UnionType) for kind in get_args(item))
    return [cast(type, kind) for kind in kinds if is_dataclass(kind)]


def _entries(cls: type, section: str, default: Range | None) -> Iterator[Entry]:
    hints, comments = get_type_hints(cls), _comments(cls)
    for field in fields(cls):
        if is_dataclass(hints[field.name]):
            continue
        key = f"{section}.{field.name}"
        allowed = range_of(field, default)
        expects = describe_type(hints[field.name]) + (f"; {allowed.expected}" if allowed else "")
        yield Entry(
            key=key,
            expects=_cell(expects),
            default=_cell(_default(field)),
            description=_cell(comments.get(field.name, "")),
        )


def _default(field: Field[Any]) -> str:
    if field.default_factory is dict:
        return "`{}`"
    if field.default is MISSING:
        return "required"
    words = {None: "null", True: "true", False: "false", "": '""', (): "[]"}
    value = field.default
    if isinstance(value, tuple) and value:
        return f"`{list(value)}`"
    # By identity of type, since 1 == True.
    plain = value is None or isinstance(value, bool | str) or value == ()
    return f"`{words.get(value, value) if plain else value}`"


def _one_line(cls: type) -> str:
    return " ".join((inspect.getdoc(cls) or "").split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _comments(cls: type) -> dict[str, str]:
    """The comment above each field, and that on its line; of inherited fields too."""
    bases = [_comments(base) for base in cls.__bases__ if is_dataclass(base)]
    inherited = {name: comment for base in bases for name, comment in base.items()}
    return inherited | _own_comments(cls)


def _own_comments(cls: type) -> dict[str, str]:
    lines = Path(inspect.getfile(cls)).read_text().splitlines()
    tree = ast.parse("\n".join(lines))
    node = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == cls.__name__)
    found: dict[str, str] = {}
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
    PAGE.write_text(render())
    print(f"wrote {PAGE}")
