"""Run the test code of a problem against a program that runs in another process."""

import ast
import builtins
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from megarl_sandbox.jail import pytest_stand_in
from megarl_sandbox.jail.remote import Peer, RemoteObject
from megarl_sandbox.jail.same import same_value
from megarl_sandbox.jail.tested import PROGRAM_MODULES, classes_of
from megarl_sandbox.jail.usual import USUAL

_SAME = "__same_value__"


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """The test code of one test.

    setup: code that both the program and the test code run first.
    entry_point: expression for the function that `check` is called with; its first name is always the program's.
    tolerance: of `assert a == b` with a float b; None compares as Python does.
    """

    test: str
    setup: str
    entry_point: str | None
    tolerance: float | None


def run_suite(suite: Suite, make_peer: Callable[[dict[str, type[Any]]], Peer]) -> tuple[bool, str, bool]:
    """Run a test; return whether it passed, why not, and whether the program was there to the end."""
    names = {**USUAL, "__name__": "test"}
    exec(compile(suite.setup, "setup", "exec", dont_inherit=True), names)
    given = {name for name, value in names.items() if USUAL.get(name) is not value}
    peer = make_peer({name: names[name] for name in given if isinstance(names[name], type)})
    try:
        tree = ast.parse(suite.test)
        candidate = _bind_names(suite, tree, names, given, peer)
        if suite.tolerance is not None:
            tree = ast.fix_missing_locations(_Tolerant().visit(tree))
            names[_SAME] = lambda actual, expected: same_value(actual, expected, suite.tolerance)
        exec(compile(tree, "test", "exec", dont_inherit=True), names)
        own = {
            each.name for each in tree.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        }
        if "check" in own:
            names["check"](candidate())
        else:
            for run in _test_functions(own, names):
                run()
        peer.require_told_apart()
    except BaseException as error:  # whatever a test raises, it has not passed
        # Where the test's own code was, not what it called.
        frames = [each for each in traceback.extract_tb(error.__traceback__) if each.filename in ("test", "setup")]
        where = f" (line {frames[-1].lineno} of {frames[-1].filename})" if frames else ""
        return False, f"{type(error).__name__}: {error}"[:1000] + where, not peer.is_broken
    return not peer.is_broken, "", not peer.is_broken


def _bind_names(
    suite: Suite, tree: ast.Module, names: dict[str, Any], given: set[str], peer: Peer
) -> Callable[[], Any]:
    """Give the test code the program's names, and return what makes the function under test.

    Builtins, usual names and names of the setup keep their meaning, whatever the program calls by them, unless the
    function under test has such a name.
    """
    entry = suite.entry_point or ""
    entry_name = next((node.id for node in ast.walk(ast.parse(entry)) if isinstance(node, ast.Name)), "")
    wanted = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} | {entry_name}
    wanted -= (set(dir(builtins)) | set(USUAL) | given) - {entry_name}
    used = classes_of(ast.Module(body=[*tree.body, *ast.parse(entry).body], type_ignores=[]))
    classes = {name for name in used if name != entry and name.lstrip("_")[:1].isupper()}

    def find(name: str) -> Any:
        value = peer.ask("find", None, name)
        if isinstance(value, type) and issubclass(AssertionError, value):
            raise TypeError(f"the program's {name} is {value.__name__}, which would catch failures of the test")
        return RemoteObject(peer, value._number, makes_own=name in classes) if type(value) is RemoteObject else value

    for name in wanted.intersection(peer.ask("names", None)):
        names[name] = find(name)
    for name in PROGRAM_MODULES:
        sys.modules[name] = _Program(name, peer, find, names)
    sys.modules["pytest"] = pytest_stand_in
    return lambda: eval(compile(entry, "entry point", "eval", dont_inherit=True), names)


class _Program(ModuleType):
    """The module under whose name tests import the program's functions."""

    def __init__(self, name: str, peer: Peer, find: Callable[[str], Any], names: Mapping[str, Any]) -> None:
        super().__init__(name)
        self.__dict__.update(_peer=peer, _find=find, _names=names)

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            # The test has got those of the program that it uses: whatever else it has is its own.
            public = {str(each) for each in self._peer.ask("names", None) if str(each)[:1] != "_"}
            return sorted(public - set(dir(builtins)) - set(self._names))
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self._find(name)
        except KeyError as error:
            raise AttributeError(f"the program defines no {name}") from error


class _Tolerant(ast.NodeTransformer):
    """Let `assert a == b` accept floats that differ by the tolerance."""

    def visit_Assert(self, node: ast.Assert) -> ast.Assert:
        match node.test:
            case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
                node.test = ast.Call(func=ast.Name(id=_SAME, ctx=ast.Load()), args=[left, right], keywords=[])
        return node


def _test_functions(own: set[str], names: dict[str, Any]) -> Iterator[Callable[[], Any]]:
    """Yield the tests that unittest or pytest would find."""
    for name in sorted(own, key=list(names).index):
        found = names[name]
        if inspect.isclass(found) and "unittest" in sys.modules and issubclass(found, sys.modules["unittest"].TestCase):
            yield lambda case=found: _run_case(case)  # type: ignore[misc]
        elif inspect.isclass(found) and name.startswith("Test"):
            for each in [each for each in vars(found) if each.startswith("test")]:
                yield lambda case=found, each=each: _run_method(case(), each, names)  # type: ignore[misc]
        elif name.startswith("test") and callable(found):
            yield lambda test=found: _run_function(test, names)  # type: ignore[misc]


def _run_case(case: Any) -> None:
    """Run a `unittest.TestCase`; AssertionError with its first failure."""
    import unittest

    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    problems = [*result.failures, *result.errors]
    if problems:
        raise AssertionError(problems[0][1].strip().rpartition("\n")[2])
    if result.testsRun == 0 or result.skipped or result.unexpectedSuccesses:
        raise AssertionError(f"ran {result.testsRun} tests, skipped {len(result.skipped)}")


def _run_method(instance: Any, name: str, names: dict[str, Any]) -> None:
    for prepare in ("setup_method", "setUp"):
        if hasattr(instance, prepare):
            getattr(instance, prepare)()
    _run_function(getattr(instance, name), names)


def _run_function(function: Any, names: dict[str, Any]) -> None:
    """Run a test in the style of pytest, once for each of its parameter sets."""
    for values in pytest_stand_in.parameter_sets(function):
        arguments = {
            name: values[name] if name in values else pytest_stand_in.fixture_value(name, names)
            for name in inspect.signature(function).parameters
        }
        outcome = function(**arguments)
        if inspect.iscoroutine(outcome):
            import asyncio

            asyncio.run(outcome)
