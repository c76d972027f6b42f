"""Print how large and how entangled the packages are: python -m tools.rooms

Rooms are the folders and modules at the top of megarl/. An arrow is a pair of rooms of which one imports the other,
also inside functions. A circle is one of arrows. `tests/unit/test_import_rules.py` has the limits of these figures.
"""

import ast
import graphlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomFigures:
    """lines: by room of megarl/ and by other package. takers: files outside config/ that take a `Config`."""

    lines: Mapping[str, int]
    arrows: frozenset[tuple[str, str]]
    circle: tuple[str, ...]
    any_per_1000: float
    takers: tuple[str, ...]


def _imported_rooms(nodes: Sequence[ast.AST], package: tuple[str, ...]) -> set[str]:
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    for node in (node for node in nodes if isinstance(node, ast.ImportFrom)):
        above = package[: len(package) - node.level + 1] if node.level else ()
        names += [".".join((*above, *filter(None, [node.module]), alias.name)) for alias in node.names]
    return {parts[1] for parts in (name.split(".") for name in names) if parts[0] == "megarl" and len(parts) > 1}


def measure(root: Path = ROOT) -> RoomFigures:
    """Read all packages of a checkout."""
    lines, imports, takers = Counter[str](), defaultdict[str, set[str]](set), []
    num_any = num_lines = 0
    for path in sorted(path for package in root.glob("megarl*/") for path in package.rglob("*.py")):
        place, text = path.relative_to(root), path.read_text(encoding="utf-8")
        in_product = place.parts[0] == "megarl"
        room = place.parts[1].removesuffix(".py") if in_product else place.parts[0]
        lines[room] += len(text.splitlines())
        if not in_product:
            continue
        nodes = list(ast.walk(ast.parse(text)))
        imports[room] |= _imported_rooms(nodes, place.parts[:-1])
        num_lines += len(text.splitlines())
        num_any += sum(isinstance(node, ast.Name) and node.id == "Any" for node in nodes)
        given = [ast.unparse(node.annotation) for node in nodes if isinstance(node, ast.arg) and node.annotation]
        given += [ast.unparse(node.annotation) for node in nodes if isinstance(node, ast.AnnAssign)]
        # Some are quoted, since they are imported for the type checker alone.
        if room != "config" and not {"Config", "'Config'"}.isdisjoint(given):
            takers.append(place.as_posix())
    arrows = {(room, other) for room, others in imports.items() for other in others & imports.keys() - {room}}
    targets = {room: {other for one, other in arrows if one == room} for room in imports}
    try:
        graphlib.TopologicalSorter(targets).prepare()
        circle = ()
    except graphlib.CycleError as error:
        circle = tuple(error.args[1])
    return RoomFigures(
        lines={room: number for room, number in lines.items() if number},
        arrows=frozenset(arrows),
        circle=circle,
        any_per_1000=1000 * num_any / num_lines,
        takers=tuple(takers),
    )


if __name__ == "__main__":
    found = measure()
    for room, number in sorted(found.lines.items(), key=lambda item: -item[1]):
        print(f"{number:6} {room:16} {' '.join(sorted(to for one, to in found.arrows if one == room))}")
    print(
        f"{sum(found.lines.values())} lines; {len(found.arrows)} arrows; circle: {' → '.join(found.circle) or 'none'}"
    )
    print(f"{found.any_per_1000:.1f} Any per 1,000 lines of megarl/; {len(found.takers)} files take the whole Config:")
    print("\n".join(f"    {place}" for place in found.takers))
