"""Stand in for pytest in test code: raises, approx, parametrised tests and simple fixtures; other marks do nothing."""

import inspect
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

_PARAMETERS = "megarl_parameters"
_FIXTURES: dict[str, Callable[..., Any]] = {}


class ExceptionInfo:
    """The exception that `raises` met."""

    value: BaseException

    @property
    def type(self) -> type[BaseException]:
        return type(self.value)


class raises:  # noqa: N801 - pytest's name
    """A context that fails unless its statements raise an exception of this class, whose text matches."""

    def __init__(self, expected: Any, *args: Any, match: str | None = None, **kwargs: Any) -> None:
        self._expected, self._match, self._info = expected, match, ExceptionInfo()
        if args:
            with self:
                args[0](*args[1:], **kwargs)

    def __enter__(self) -> ExceptionInfo:
        return self._info

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        if error is None:
            raise AssertionError(f"expected {self._expected}, got no exception")
        if not isinstance(error, self._expected):
            return False
        if self._match is not None and not re.search(self._match, str(error)):
            raise AssertionError(f"expected an error that matches {self._match!r}, got {error}")
        self._info.value = error
        return True


class approx:  # noqa: N801 - pytest's name
    """A number, or a list, tuple or dict of numbers, that equals others up to max(rel·|expected|, abs)."""

    def __init__(self, expected: Any, rel: float | None = None, abs: float | None = None) -> None:
        self._expected = expected
        self._absolute = 1e-12 if abs is None else abs
        self._relative = (1e-6 if abs is None else 0.0) if rel is None else rel

    def __eq__(self, actual: object) -> bool:
        return self._same(actual, self._expected)

    __hash__ = None  # type: ignore[assignment]

    def _same(self, actual: Any, expected: Any) -> bool:
        if isinstance(expected, list | tuple):
            return (
                type(actual) is type(expected)
                and len(actual) == len(expected)
                and all(map(self._same, actual, expected))
            )
        if isinstance(expected, dict):
            return actual.keys() == expected.keys() and all(self._same(actual[k], v) for k, v in expected.items())
        if not isinstance(actual, int | float | complex) or isinstance(actual, bool) or actual == expected:
            return bool(actual == expected)
        difference = abs(actual - expected)
        return bool(math.isfinite(difference) and difference <= max(self._relative * abs(expected), self._absolute))


class _PytestMarks:
    """The decorators of `pytest.mark`."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("skip", "skipif", "xfail"):
            raise AttributeError(f"tests of programs cannot be marked {name}")
        return lambda *args, **kwargs: args[0] if len(args) == 1 and callable(args[0]) and not kwargs else _unchanged

    def parametrize(self, names: str | Sequence[str], values: Any, **_: Any) -> Callable[[Any], Any]:
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        rows = [dict(zip(names, [value] if len(names) == 1 else value, strict=True)) for value in values]

        def mark(function: Any) -> Any:
            setattr(function, _PARAMETERS, [*getattr(function, _PARAMETERS, []), rows])
            return function

        return mark


mark = _PytestMarks()


def param(*values: Any, **_: Any) -> Any:
    """Return one row of `mark.parametrize`."""
    return values[0] if len(values) == 1 else values


def fixture(*args: Any, **kwargs: Any) -> Any:
    """Register a function whose result tests get by its name."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _FIXTURES[kwargs.get("name") or function.__name__] = function
        return function

    return register(args[0]) if args else register


def fail(reason: str = "") -> None:
    """Fail the test."""
    raise AssertionError(reason)


def parameter_sets(function: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the parameters of each run of a test."""
    for rows in itertools.product(*getattr(function, _PARAMETERS, [])):
        yield {name: value for row in rows for name, value in row.items()}


def fixture_value(name: str, names: Mapping[str, Any]) -> Any:
    """Return a new value of a fixture. TypeError if the test code does not define it."""
    if name not in _FIXTURES:
        raise TypeError(f"no fixture {name!r} in the test code")
    function = _FIXTURES[name]
    value = function(**{each: fixture_value(each, names) for each in inspect.signature(function).parameters})
    return next(value) if inspect.isgenerator(value) else value


def _unchanged(function: Any) -> Any:
    return function
