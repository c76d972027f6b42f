"""Define the rules that translate values of other trainers' options into values of megarl's keys, by name.

A rule is a function of an option's value and of all options of the run (by their names in that framework, with
defaults). It returns the value of the option's key, or one value for each key if there are several; `UNSET` leaves a
key as it is. If a value has no counterpart, the rule raises ConfigError with the reason. The tables in `peers/` name
rules, with their further arguments if they have some. Rules for single options are in `translate`. A rule declares the
types that it translates; whatever it raises for another type says that the value is of the wrong kind.
"""

from collections.abc import Callable, Mapping
from enum import Enum
from functools import partial
from typing import Any, Final, TypeAlias

from megarl.errors import ConfigError
from megarl.registry import Registry

Options: TypeAlias = Mapping[str, Any]
Rule: TypeAlias = Callable[..., object]

RULES: Registry[Rule] = Registry("rule", key="rule")


class _Unset(Enum):
    """The class of the marker `UNSET`, by which a rule leaves a key as it is; tables write `unset`."""

    UNSET = "unset"


UNSET: Final = _Unset.UNSET


@RULES.register("choose")
def choose(value: object, _: Options, *, values: Mapping[object, object]) -> object:
    """Look a value up in a table, which has a list where the option has several keys."""
    if value not in values:
        known = ", ".join(map(repr, values))
        raise ConfigError(f"{value!r} has no counterpart; those of {known} do")
    return values[value]


@RULES.register("elsewhere")
def elsewhere(*_: object) -> object:
    """Leave the key to the rule of another option, which reads this one."""
    return UNSET


@RULES.register("if_set")
def if_set(value: object, options: Options, *, option: str) -> object:
    """Return the value if another option is on."""
    return value if options.get(option) else UNSET


@RULES.register("with_tp")
def with_tp(value: object, options: Options, *, tp: str) -> object:
    """Return a switch of tensor parallelism, `UNSET` where the option `tp` asks for none."""
    return bool(value) if (options.get(tp) or 1) > 1 else UNSET


@RULES.register("value_of")
def value_of(value: object, options: Options, *, option: str, default: object) -> object:
    """Return the value of another option if this one, a switch, is on."""
    return options.get(option, default) if value else UNSET


@RULES.register("with_value")
def with_value(value: object, _: Options, *, other: object) -> object:
    """Return the value for the first key, and a fixed value for the second, if the option is set."""
    return (value, other) if value else UNSET


@RULES.register("at_least_zero")
def at_least_zero(value: float, _: Options) -> float:
    """Return the value, or 0 if it is negative, with which the other framework says never."""
    return max(value, 0)


@RULES.register("is_given")
def is_given(value: object, _: Options) -> bool:
    """Return whether the option has a value."""
    return bool(value)


@RULES.register("true_if_given")
def true_if_given(value: object, _: Options) -> object:
    """Return true if the option has a value."""
    return bool(value) or UNSET


@RULES.register("zero_if_true")
def zero_if_true(value: object, _: Options) -> object:
    """Return 0 if the option, a switch, is on."""
    return 0 if value else UNSET


@RULES.register("whole")
def whole(value: float | str | None, _: Options) -> int | None:
    """Return the value as a whole number; null stays null."""
    return None if value is None else int(value)


@RULES.register("inverse")
def inverse(value: float | None, _: Options) -> float | None:
    """Return 1 / value; null stays null."""
    return None if value is None else 1 / value


@RULES.register("unless_off")
def unless_off(value: float | None, _: Options) -> float | None:
    """Return the value of a bound, or None if it is null or negative, with which verl and LUFFY switch a bound off."""
    return None if value is None or value < 0 else value


@RULES.register("if_given")
def if_given(value: float | str | None, _: Options) -> object:
    """Return the value, but `UNSET` if it is null or negative, with which the other framework asks for its default."""
    return UNSET if value is None or (not isinstance(value, str) and value < 0) else value


def listed(value: object) -> list[str]:
    """Return a list of files, given as one name, as a list, or as names separated by commas."""
    return value if isinstance(value, list) else [part for part in str(value).split(",") if part]


@RULES.register("as_list")
def as_list(value: object, _: Options) -> object:
    """Return what `listed` makes of a value; null leaves the key as it is."""
    return UNSET if value is None else listed(value)


# A switch that is one of several for the same setting: on sets it, off leaves it to the others.
RULES.register("switch")(partial(choose, values={True: True, False: UNSET, None: UNSET}))
RULES.register("negated")(partial(choose, values={True: False, False: True}))
RULES.register("recompute")(partial(choose, values={True: "full", False: "none"}))
RULES.register("schedule")(
    partial(
        choose,
        values={
            "constant": "constant",
            "constant_with_warmup": "constant",
            "linear": "linear",
            "cosine": "cosine",
            None: UNSET,
        },
    )
)
RULES.register("schedule_with_floor")(
    partial(
        choose,
        values={
            "constant": ("constant", UNSET),
            "constant_with_warmup": ("constant", UNSET),
            "linear": ("linear", UNSET),
            "cosine": ("cosine", UNSET),
            "cosine_with_min_lr": ("cosine", 0.1),
        },
    )
)
