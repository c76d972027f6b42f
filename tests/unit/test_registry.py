from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import pytest

from megarl.errors import ConfigError
from megarl.registry import FunctionRegistry, RegistrationError, Registry, noting, readers_of


@pytest.fixture
def colours() -> Registry[int]:
    registry: Registry[int] = Registry("colour", key="paint.colour")
    registry.register("red", "crimson")(1)
    registry.register("blue")(2)
    return registry


def test_get_by_name_and_alias(colours: Registry[int]) -> None:
    assert (colours.get("red"), colours.get("crimson"), colours.get("blue")) == (1, 1, 2)
    assert list(colours) == ["blue", "crimson", "red"]
    assert "red" in colours
    assert "green" not in colours


def test_decorator_returns_its_target(colours: Registry[int]) -> None:
    assert colours.register("green")(3) == 3


def test_unknown_name_lists_the_known_and_the_closest(colours: Registry[int]) -> None:
    with pytest.raises(ConfigError) as info:
        colours.get("rad")
    message = str(info.value)
    assert message == ("paint.colour: unknown colour 'rad'; did you mean 'red'? expected one of: blue, crimson, red")


def test_no_suggestion_without_a_close_name(colours: Registry[int]) -> None:
    with pytest.raises(ConfigError, match=r"unknown colour 'xyz'; expected one of: blue, crimson, red"):
        colours.get("xyz")


@pytest.mark.parametrize("names", [("red",), ("crimson",), ("new", "blue")])
def test_duplicates_are_refused_and_change_nothing(colours: Registry[int], names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="already registered"):
        colours.register(*names)(9)
    assert list(colours) == ["blue", "crimson", "red"]
    assert colours.get("red") == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Brush:
    stroke: Callable[[int, int], int] = field(kw_only=False)
    options: Collection[str] = ()


@pytest.fixture
def brushes() -> FunctionRegistry[Callable[[int, int], int], Brush]:
    return FunctionRegistry("brush", key="paint.brush", entry=Brush, parameters=("width", "height"))


def test_a_function_is_stored_with_what_it_declares(
    brushes: FunctionRegistry[Callable[[int, int], int], Brush],
) -> None:
    @brushes.register("fine", options=("hardness",))
    @brushes.register("broad", "wide", options=("hardness", "load"))
    def area(width: int, height: int) -> int:
        return width * height

    assert area(2, 3) == 6
    assert brushes.get("wide") == Brush(area, options=("hardness", "load"))
    # In the order in which they were registered: decorators apply from below.
    assert list(brushes.entries()) == ["broad", "wide", "fine"]
    assert readers_of(brushes) == {"hardness": ["broad", "wide", "fine"], "load": ["broad", "wide"]}


@pytest.mark.parametrize(
    ("function", "declared", "message"),
    [
        (
            len,
            {},
            r"brush 'x': got len\(obj\), expected a function that takes \(width, height\); change its parameters",
        ),
        (3, {}, r"brush 'x': got a int, expected a function that takes \(width, height\)"),
        (lambda width, height: 1, {"size": 2}, "brush 'x': declares 'size', expected names among options; correct it"),
    ],
)
def test_what_does_not_fit_is_refused(
    brushes: FunctionRegistry[Callable[[int, int], int], Brush],
    function: Callable[[int, int], int],
    declared: dict[str, int],
    message: str,
) -> None:
    with pytest.raises(RegistrationError, match=message):
        brushes.register("x", **declared)(function)
    assert list(brushes) == []


def test_registrations_are_noted_and_can_be_taken_back(colours: Registry[int]) -> None:
    with noting() as noted:
        colours.register("green", "grass")(3)
    (registration,) = noted
    registration.undo()
    assert list(colours) == ["blue", "crimson", "red"]
    registration.register_again()
    assert colours.get("grass") == 3
    with pytest.raises(RegistrationError, match="already registered"):
        registration.register_again()
