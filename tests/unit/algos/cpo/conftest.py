"""CPO inputs: the golden batch, and random ones."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megarl.algos.cpo import CpoInputs
from megarl.config.algo import CpoConfig


@pytest.fixture(scope="session")
def golden_inputs() -> Callable[[dict[str, Any]], CpoInputs]:
    """The inputs of a golden case of section A.wrap, in float64."""

    def make(case: dict[str, Any]) -> CpoInputs:
        batch = {k: torch.tensor(v, dtype=torch.float64) for k, v in case["inputs"].items() if k != "uid"}
        return CpoInputs(
            advantages=batch["adv"],
            loss_mask=batch["mask"].bool(),
            correct=batch["reward"] > 0,
            difficulty=batch["difficulty"].long(),
            vocab_size=case["params"].get("vocab_size", 1000),
            old_logprobs=batch["lp"],
            hint_logprobs=batch["lp_hint"],
            entropy=batch["entropy"],
        )

    return make


@pytest.fixture(scope="session")
def golden_config() -> Callable[..., CpoConfig]:
    """The configuration of a golden case of section A.wrap."""

    def make(case: dict[str, Any], **further: Any) -> CpoConfig:
        names = {"cpo_lambda": "ratio_clamp"}
        params = {names.get(k, k): v for k, v in case["params"].items() if k != "vocab_size"}
        return CpoConfig(**{**params, **further})

    return make
