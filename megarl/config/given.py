"""Tell settings that somebody has given from those that a search may choose."""

from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from megarl.config.schema import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenSettings:
    """A configuration, `base`, of which a search may change every setting but those whose keys are in `given`."""

    base: Config
    given: frozenset[str]

    def chosen(self, section: str, **values: Any) -> dict[str, Any]:
        """Return those of a section's values that are left to the search."""
        return {name: value for name, value in values.items() if f"{section}.{name}" not in self.given}

    def obeys(self, config: Config) -> bool:
        """Return whether a configuration has every setting as it is given."""
        own, asked = ([attrgetter(key)(each) for key in sorted(self.given)] for each in (config, self.base))
        return own == asked
