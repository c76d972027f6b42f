"""A public class has a name of its own, so that a reader who meets it knows which one it is."""

import ast
import re
from collections import defaultdict
from pathlib import Path

from tests.helpers.syntax import nodes_of

ROOT = Path(__file__).parents[2]


def repeated_classes(files: dict[str, str]) -> dict[str, list[str]]:
    """Public classes that several places define, nested ones too: name → where."""
    places = defaultdict(list)
    for path, source in files.items():
        for node in nodes_of(source):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{path}:{node.lineno}")
    return {name: where for name, where in sorted(places.items()) if len(where) > 1}


def own_files() -> list[Path]:
    """The modules of all packages, and the tools."""
    directories = [*ROOT.glob("megarl*"), ROOT / "tools"]
    return [path for directory in sorted(directories) for path in sorted(directory.rglob("*.py"))]


def test_no_public_class_name_is_used_twice() -> None:
    files = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in own_files()}
    assert len(files) > 100
    assert repeated_classes(files) == {}, "give all but one of them a name that says more"


def test_a_repeated_class_is_named_with_its_places() -> None:
    files = {"a.py": "class Window:\n    class Inner: ...", "b.py": "import a\nclass _Inner: ...\nclass Window: ..."}
    assert repeated_classes(files) == {"Window": ["a.py:1", "b.py:3"]}


# Words of ours for what the field calls transport, message, rendezvous, slot, watchdog, janitor, offloading, inter-turn
# tokens, conversation and so on.
COINED = frozenset(
    [
        "parcel",
        "parcels",
        "meeting",
        "meetings",
        "seat",
        "seats",
        "vigil",
        "caretaker",
        "residency",
        "glue",
        "bereft",
        "nursery",
        "berth",
        "holes",
        "worlds",
    ]
)
COINED_CLASSES = re.compile(r".*Wire|_?(?:Alike|Ends|Heard|Lent|Marks|Raw|Regime|Room|Share|Sink|Talk|Ways)")


def coined_names(source: str) -> list[str]:
    """Definitions, arguments and variables whose names have such words, with their lines."""
    found = []
    for node in nodes_of(source):
        match node:
            case ast.ClassDef(name=name) if COINED_CLASSES.fullmatch(name):
                found.append(f"{name}:{node.lineno}")
            case (
                ast.ClassDef(name=name)
                | ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.arg(arg=name)
                | ast.Name(id=name, ctx=ast.Store())
                | ast.Attribute(attr=name, ctx=ast.Store())
            ) if COINED & {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)}:
                found.append(f"{name}:{node.lineno}")
    return found


def test_names_are_those_of_the_field() -> None:
    found = {str(path.relative_to(ROOT)): coined_names(path.read_text(encoding="utf-8")) for path in own_files()}
    assert {path: names for path, names in found.items() if names} == {}
    modules = {path for path in found if COINED & set(re.split(r"[/_.]", path))}
    assert modules == set()


def test_coined_names_are_found_and_attention_sinks_are_not() -> None:
    source = (
        "class TcpWire: ...\nclass GradientSinks: ...\ndef open_seat(meeting, world_size): ...\nself.glue = sink = 1"
    )
    assert sorted(coined_names(source)) == ["TcpWire:1", "glue:4", "meeting:3", "open_seat:3"]
