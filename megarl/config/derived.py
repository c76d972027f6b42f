"""Derive settings that are null or auto from other settings and the machine, and say what each was derived from.

Every such setting has one pure function, which returns a `Derived`. A run derives anew whenever it starts, so what it
saves keeps the null, and a resumed run follows the machine that it is on; what it chose for auto it saves. `--dry-run`
shows the results.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, TypeVar, cast

from megarl.config.schema import Config
from megarl.host.device.platform import Platform

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """The value that a run uses for a setting that is null, and the reason for it."""

    key: str
    value: object
    reason: str


def left_open(config: Config, derived: Iterable[Derived | None]) -> tuple[Derived, ...]:
    """Return those whose settings are null or auto; None is for what this run does not need."""
    open_ = (None, "auto")
    return tuple(each for each in derived if each and reduce(getattr, each.key.split("."), config) in open_)


def filled(config: Config, derived: Iterable[Derived | None]) -> Config:
    """Return the configuration with derived values in place of null."""
    return reduce(lambda known, each: _with(known, each.key.split("."), each.value), left_open(config, derived), config)


def _with(section: T, keys: Sequence[str], value: object) -> T:
    first, *rest = keys
    return cast(
        T, replace(cast(Any, section), **{first: _with(getattr(section, first), rest, value) if rest else value})
    )


def host_group(config: Config, here: Platform) -> Derived | None:
    """Derive `sync.host_group` for a run on several hosts."""
    placement = config.placement
    if placement.trainer.num_nodes == 1 and placement.mode == "colocated":
        return None
    value = config.sync.group_between_hosts(here)
    reason = "between hosts, NCCL uses the devices' own links"
    if value == "gloo":
        reason = "sync.delta makes differences in host memory"
        if here.backend != "nccl":
            reason = f"this machine is {here.name}; on CUDA it is device"
    return Derived(key="sync.host_group", value=value, reason=reason)
