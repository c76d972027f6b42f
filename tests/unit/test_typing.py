"""What types cannot see is rare: `Any`, and methods of remote actors that are named by strings."""

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.syntax import nodes_of

PACKAGE = Path(__file__).parents[2] / "megarl"
# The module that calls remote methods for all others.
PROXY = "cluster/remotes.py"
ROOMS = ("cluster", "rollout", "sync", "train")
MOST_PER_1000_LINES = 5.0


def root_of(expression: ast.expr) -> str:
    """Return the name that a chain of attributes and calls begins with: `ray` of `ray.remote(num_cpus=0)(f)`."""
    while isinstance(expression, ast.Attribute | ast.Call):
        expression = expression.func if isinstance(expression, ast.Call) else expression.value
    return expression.id if isinstance(expression, ast.Name) else ""


def remote_methods(source: str) -> Iterator[int]:
    """Yield the lines that call `.remote` of anything but a class or function that `ray.remote` made remote here."""
    nodes = nodes_of(source)
    made = {
        target.id
        for node in nodes
        if isinstance(node, ast.Assign) and root_of(node.value) == "ray"
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in nodes:
        is_remote = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "remote"
        if is_remote and root_of(node) not in {"ray", *made}:
            yield node.lineno


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ('process.actor.call.remote("load", 1)', [1]),
        ('getattr(actor, "load").remote()', [1]),
        ('actor.serve.options(num_returns="streaming").remote()', [1]),
        ("task = ray.remote(num_cpus=0)(f).options(name='f')\ntask.remote(1)\nother.remote(1)", [3]),
        ("ray.remote(Actor).remote(1)\nconfig.rewards.remote.items()", []),
    ],
)
def test_calls_by_name_are_found(source: str, lines: list[int]) -> None:
    assert list(remote_methods(source)) == lines


def test_no_remote_method_is_named_by_a_string() -> None:
    """Everybody passes the method itself to a `Process`, so that mypy checks arguments and results."""
    found = {
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in PACKAGE.rglob("*.py")
        if path != PACKAGE / PROXY
        for line in remote_methods(path.read_text(encoding="utf-8"))
    }
    assert not found


@pytest.mark.parametrize("room", ROOMS)
def test_any_is_rare(room: str) -> None:
    sources = [path.read_text(encoding="utf-8") for path in (PACKAGE / room).rglob("*.py")]
    count = sum(
        token.type == tokenize.NAME and token.string == "Any"
        for source in sources
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
    )
    num_lines = sum(len(source.splitlines()) for source in sources)
    assert 1000 * count / num_lines <= MOST_PER_1000_LINES
