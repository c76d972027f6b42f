"""Load a run's configuration from YAML files and `key=value` overrides into frozen dataclasses, and check it."""

from megarl.config.load import compose, dump, from_dict, load_config
from megarl.config.schema import Config

__all__ = ["Config", "compose", "dump", "from_dict", "load_config"]
