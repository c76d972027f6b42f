"""What `megarl train-preference` adds to pairs before a step, and its measures of held-out pairs."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from megarl.algos.preference import preference_objective
from megarl.config.schema import TrainPreferenceConfig
from megarl.train.passes import RolePasses
from megarl.train.supervised import validate_preferences, with_pair_quantities
from megarl.types import Row
from megarl.types.messages import Role
from tests.helpers.rows import random_rows


class FixedPasses(RolePasses):
    """A model that gives each token of a response the same log-prob, and keeps how many rows it saw."""

    def __init__(self, logprob: float) -> None:
        self.logprob, self.seen = logprob, list[int]()

    def forward(self, rows: Sequence[Row], *, step: int) -> dict[str, list[Any]]:
        self.seen.append(len(rows))
        return {"logprobs": [np.full(row.num_response_tokens, self.logprob, np.float32) for row in rows]}


def passes(actor: float, reference: float) -> Mapping[Role, FixedPasses]:
    return {Role.ACTOR: FixedPasses(actor), Role.REFERENCE: FixedPasses(reference)}


# Two pairs: chosen responses of 1 and 2 tokens, rejected ones of 3 and 4.
PAIRS = random_rows([(2, 1), (2, 2), (2, 3), (2, 4)], holes=False)


def reads(objective: str) -> frozenset[str]:
    return preference_objective(TrainPreferenceConfig(objective=objective)).reads


def test_dpo_asks_the_reference_once() -> None:
    models = passes(-1.0, -2.0)
    rows = with_pair_quantities(PAIRS, reads("dpo"), models, step=1)
    assert [row.quantities["ref_logprobs"].tolist() for row in rows] == [[-2.0] * n for n in (1, 2, 3, 4)]
    assert (models[Role.REFERENCE].seen, models[Role.ACTOR].seen) == ([4], [])


@pytest.mark.parametrize(
    # Responses of 1, 2, 3 and 4 tokens, each with a difference of ±½ per token: a mean of ±½ · 2.5; never below 0.
    ("actor", "kl"),
    [(-1.5, 1.25), (-2.5, 0.0)],
)
def test_kto_estimates_one_kl_for_the_batch(actor: float, kl: float) -> None:
    models = passes(actor, -2.0)
    rows = with_pair_quantities(PAIRS, reads("kto"), models, step=1)
    assert [row.quantities["batch_kl"].tolist() for row in rows] == [[kl] * n for n in (1, 2, 3, 4)]
    assert [row.quantities["ref_logprobs"].tolist() for row in rows] == [[-2.0] * n for n in (1, 2, 3, 4)]
    assert (models[Role.REFERENCE].seen, models[Role.ACTOR].seen) == ([8], [4])


class Pairs:
    """Three pairs: chosen responses of 1, 2 and 3 tokens, rejected ones of 2, 3 and 1."""

    def __len__(self) -> int:
        return 3

    def rows(self, indices: Sequence[int]) -> list[Row]:
        return random_rows([(2, n[i]) for n in ((1, 2, 3), (2, 3, 1)) for i in indices], holes=False)


def test_held_out_pairs_in_batches_of_two() -> None:
    objective = preference_objective(TrainPreferenceConfig(beta=0.5, batch_size=2))
    # ln(π/π_ref) is 1 per token, so rewards are half the lengths: differences −½, −½ and 1.
    result = validate_preferences(Pairs(), objective, passes(-1.0, -2.0), step=7)  # type: ignore[arg-type]
    loss = (2 * math.log(1 + math.exp(0.5)) + math.log(1 + math.exp(-1))) / 3
    assert result.score == pytest.approx(1 / 3)
    assert result.metrics == pytest.approx(
        {
            "val/preference/loss": loss,
            "val/preference/accuracy": 1 / 3,
            "val/preference/margin": 0.0,
            "val/preference/reward_chosen": 1.0,
            "val/preference/reward_rejected": 1.0,
            "val/preference/logprobs_chosen": -2.0,
            "val/preference/logprobs_rejected": -2.0,
            "val/preference/num_pairs": 3,
        },
        abs=1e-6,
    )
    assert result.summary == f"validation on 3 pairs: accuracy 0.333, loss {loss:.3f}"


def test_held_out_pairs_have_one_kl() -> None:
    """Of three pairs in batches of two, the last would have no other pair to lend responses."""
    objective = preference_objective(TrainPreferenceConfig(objective="kto", batch_size=2))
    models = passes(-1.0, -2.0)
    result = validate_preferences(Pairs(), objective, models, step=7)  # type: ignore[arg-type]
    # Each of six prompts with another row's response: their 12 tokens have a difference of 1 each.
    assert result.metrics["val/preference/kl"] == pytest.approx(12 / 6)
    assert (models[Role.REFERENCE].seen, models[Role.ACTOR].seen) == ([6 + 6], [6, 6])


def test_orpo_asks_no_model() -> None:
    models = passes(-1.0, -2.0)
    assert with_pair_quantities(PAIRS, reads("orpo"), models, step=1) is PAIRS
    assert all(not model.seen for model in models.values())
