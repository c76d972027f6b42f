"""A public class has a name of its own, so that a reader who meets it knows which one it is."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]


def repeated_classes(files: dict[str, str]) -> dict[str, list[str]]:
    """Public classes that several places define, nested ones too: name → where."""
    places = defaultdict(list)
    for path, source in files.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{path}:{node.lineno}")
    return {name: where for name, where in sorted(places.items()) if len(where) > 1}


def test_no_public_class_name_is_used_twice() -> None:
    files = {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for directory in ("megarl", "megarl_answers", "megarl_sandbox", "tools")
        for path in sorted((ROOT / directory).rglob("*.py"))
    }
    assert len(files) > 100
    assert repeated_classes(files) == {}, "give all but one of them a name that says more"


def test_a_repeated_class_is_named_with_its_places() -> None:
    files = {"a.py": "class Window:\n    class Inner: ...", "b.py": "import a\nclass _Inner: ...\nclass Window: ..."}
    assert repeated_classes(files) == {"Window": ["a.py:1", "b.py:3"]}
