"""Packages that are optional: what asks for them says how to install them."""

import sys

import pytest

from megarl.environments import gym
from megarl.errors import ConfigError
from megarl.rewards import score


def test_a_missing_package_is_named_with_its_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    # What Python does where a package is missing.
    for name in ("gymnasium", "reasoning_gym", "reasoning_gym.factory"):
        monkeypatch.setitem(sys.modules, name, None)
    gym._look_up.cache_clear()
    with pytest.raises(
        ConfigError, match=r"type=gymnasium: needs the package gymnasium, .*; run pip install gymnasium"
    ):
        gym.GymnasiumEnvironment(id="FrozenLake-v1")
    with pytest.raises(ConfigError, match=r"data_source=reasoning_gym: needs .*; run pip install reasoning-gym"):
        score("reasoning_gym", "", "{}", {})
