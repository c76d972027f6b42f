"""Configuration: a frozen dataclass tree, YAML files that compose, dotted overrides, strict checks."""

from megarl.config.load import compose, dump, from_dict, load_config
from megarl.config.schema import Config

__all__ = ["Config", "compose", "dump", "from_dict", "load_config"]
