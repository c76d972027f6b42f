import pytest

from megarl.errors import ConfigError
from megarl.registry import Registry


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
