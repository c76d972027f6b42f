"""Find and change what the settings of a whole configuration name as models: directories, or ids on the hub."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megarl.config.schema import Config


def with_models(config: Config, change: Callable[[str, str], str], *, judges: bool = False) -> Config:
    """Return the configuration with another name for each of its models; `change` gets the name and its key.

    judges: whether to change the models of judge servers too.
    """
    changed: dict[str, Any] = {"model": replace(config.model, path=change(config.model.path, "model.path"))}
    for role in ("reference", "teacher", "critic", "reward_model"):
        section = getattr(config, role)
        if section.model_path is not None:
            changed[role] = replace(section, model_path=change(section.model_path, f"{role}.model_path"))
    changed["teachers"] = {
        name: replace(each, model_path=change(each.model_path, f"teachers.{name}.model_path"))
        if each.model_path is not None
        else each
        for name, each in config.teachers.items()
    }
    if judges:
        servers = {
            name: replace(server, model=change(server.model, f"rewards.judge_servers.{name}.model"))
            for name, server in config.rewards.judge_servers.items()
        }
        changed["rewards"] = replace(config.rewards, judge_servers=servers)
    return replace(config, **changed)


def models_of(config: Config, *, judges: bool = False) -> dict[str, str]:
    """Return the names of a configuration's models by their keys."""
    names = dict[str, str]()
    with_models(config, lambda name, key: names.setdefault(key, name), judges=judges)
    return names
