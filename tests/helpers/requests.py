"""Optimizer steps that pull the log-probs of all rows up."""

from collections.abc import Sequence

import numpy as np

from megarl.algos.build import build_algorithm
from megarl.config.algo import AlgoConfig
from megarl.types import Row
from megarl.types.messages import UpdateRequest


def with_advantages(rows: Sequence[Row], value: float = 1.0) -> list[Row]:
    """The same advantage on every loss token."""
    return [row.with_quantities(advantages=np.where(row.loss_mask, np.float32(value), np.float32(0))) for row in rows]


def update_request(rows: Sequence[Row], *, step: int = 0, lr: float = 1e-3) -> UpdateRequest:
    """A token-mean policy-gradient step, on-policy: ratios are 1."""
    algorithm = build_algorithm(AlgoConfig(), max_response_tokens=64)
    return UpdateRequest(
        step=step,
        objective=algorithm,
        state=algorithm.initial_state(),
        denominators=algorithm.denominators(rows),
        temperature=1.0,
        lr=lr,
    )
