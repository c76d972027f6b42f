"""Settings that nothing would read are errors: a run must be what its configuration says."""

from collections.abc import Iterable
from typing import Any

from megarl.errors import ConfigError


def refuse_unused(
    key: str, cfg: Any, names: Iterable[str], situation: str, remedy: str, *, harmless: tuple[object, ...] = ()
) -> None:
    """ConfigError for the first of `names`, fields of the dataclass `cfg`, that is not at its default.

    key: where `cfg` is in the configuration. situation: what does not read them. harmless: values that pass too, as
    they only say that a setting is off.
    """
    default = type(cfg)()
    for name in names:
        value, unset = getattr(cfg, name), getattr(default, name)
        if value != unset and value not in harmless:
            raise ConfigError(
                f"{key}.{name}: got {_shown(value)}, which is not read with {situation}; "
                f"leave it at {_shown(unset)}, or {remedy}"
            )


def _shown(value: object) -> str:
    """As in a configuration file."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)) if isinstance(value, tuple) else str(value)
