"""Read off the text of tests what they test, since a program under test is not to say so."""

import ast
import builtins
from collections.abc import Iterator, Sequence

from megarl_sandbox.jail.usual import USUAL

# Modules of which tests import the program's functions.
PROGRAM_MODULES = ("solution", "program")
_KNOWN = set(dir(builtins)) | set(USUAL)


def entry_point_of(tests: Sequence[str]) -> str | None:
    """Return the function under test if tests name nothing of the program but what has the name of a builtin or a
    usual function, as MBPP's `assert sum(10, 15) == 6` does.

    It is then the one whose arguments hold no call. Otherwise those names keep their meaning.
    """
    nodes = [node for test in tests for node in ast.walk(ast.parse(test))]
    own = set(_bound(nodes))
    if {node.id for node in nodes if isinstance(node, ast.Name)} - own - _KNOWN:
        return None
    calls = [(node.func.id, node) for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    outer = {name for name, call in calls if any(isinstance(n, ast.Call) for a in call.args for n in ast.walk(a))}
    return next((name for name, _ in calls if name not in outer | own), None)


def _bound(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Yield the names to which code itself gives a meaning, which is not the program's."""
    of_program = {
        alias
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module in PROGRAM_MODULES
        for alias in node.names
    }
    for node in nodes:
        if node in of_program:
            continue
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.ExceptHandler(name=str(name)):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.alias(name=name, asname=other):
                yield other or name.partition(".")[0]


def classes_of(tree: ast.AST) -> set[str]:
    """Return the names that code uses as classes: it looks for attributes of what they make, asks whether something is
    an instance, or compares two things that they have made. Any other upper-case name may be a function's.
    """
    nodes = list(ast.walk(tree))
    # The object that a name makes, also under names to which it is assigned, and as the value of a function.
    made: dict[str, str] = {}

    def maker(node: ast.AST | None) -> str | None:
        match node:
            case ast.Call(func=ast.Name(id=name)):
                return made.get(name, name)
            case ast.Name(id=name) | ast.Attribute(attr=name):
                return made.get(name)
            case ast.BinOp(left=left, right=right):
                return maker(left) or maker(right)
        return None

    # The value of a function is known only after its body.
    for node in nodes * 2:
        match node:
            case ast.Assign(targets=[target], value=value):
                named = [(target, value)]
                if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                    named = list(zip(target.elts, value.elts, strict=False))
                for each, source in named:
                    if isinstance(each, ast.Name | ast.Attribute) and (name := maker(source)) is not None:
                        made[each.id if isinstance(each, ast.Name) else each.attr] = name
            case ast.FunctionDef(name=function):
                for inner in ast.walk(node):
                    if isinstance(inner, ast.Return | ast.Yield) and (name := maker(inner.value)) is not None:
                        made[function] = name
    found: set[str | None] = set()
    for node in nodes:
        match node:
            case ast.Attribute(value=ast.Name(id=name)) if name not in made:
                found.add(name)
            case ast.Attribute(value=value) | ast.Subscript(value=value, ctx=ast.Store()):
                found.add(maker(value))
            case ast.Call(func=ast.Name(id="isinstance"), args=[_, ast.Name(id=name)]):
                found.add(name)
            case ast.Compare(left=left, comparators=[right]) if maker(left) == maker(right):
                found.add(maker(left))
    return {name for name in found if name is not None}
