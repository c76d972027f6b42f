"""Define the section of the vision tower, with which a model reads images."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from megarl.config.setting import POSITIVE, setting
from megarl.errors import ConfigError

# A part of a tower: its projector turns features into what the language model reads.
TowerPart: TypeAlias = Literal["none", "projector", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """Configure the vision tower of a run that reads images."""

    # The part that is trained; all: tower and projector. Engines are never sent the rest. Not with lora.
    train: Literal["none", "projector", "all"] = setting("none", affects=("engines", "workers"))
    lr: float | None = setting(None, POSITIVE)  # Peak learning rate of that part; null: optimizer.lr.

    def check(self, key: str) -> None:
        """Raise ConfigError for a learning rate of what is not trained."""
        if self.lr is not None and self.train == "none":
            raise ConfigError(f"{key}.lr: got {self.lr:g} with {key}.train=none; set train to projector or all")
