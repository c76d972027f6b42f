"""Losses on preference pairs against OpenRLHF (DPO, IPO) and TRL (KTO, ORPO)."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from trl.experimental.orpo.orpo_trainer import ORPOTrainer
from trl.trainer.kto_trainer import KTOTrainer

from megarl.algos.preference import BATCH_KL, preference_objective
from megarl.config.schema import TrainPreferenceConfig
from megarl.types import AlgoState, PolicyOutputs, RowBatch
from tests.conformance.batches import SEEDS
from tests.conformance.compare import FLOAT32, FLOAT64, assert_same_loss
from tests.conformance.peer_openrlhf import loss as openrlhf

PAIRS, WIDTH, BETA, KL = 5, 7, 0.3, 0.4


class Pairs:
    """Log-probs of the responses of both models, the chosen rows first; lengths from 1 to `WIDTH`."""

    def __init__(self, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, WIDTH + 1, (2 * PAIRS, 1), generator=g)
        self.mask = torch.arange(WIDTH) < lengths
        self.logprobs = -3 * torch.rand(2 * PAIRS, WIDTH, generator=g, dtype=torch.float64)
        self.ref = self.logprobs + 0.3 * torch.randn(2 * PAIRS, WIDTH, generator=g, dtype=torch.float64)

    def sums(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """[P] of chosen and of rejected responses."""
        chosen, rejected = torch.where(self.mask, values, 0.0).sum(1).chunk(2)
        return chosen, rejected

    def means(self, values: Tensor) -> tuple[Tensor, Tensor]:
        chosen, rejected = self.sums(values)
        num_chosen, num_rejected = self.mask.sum(1).chunk(2)
        return chosen / num_chosen, rejected / num_rejected

    def ours(self, logprobs: Tensor, objective: str, **settings: Any) -> Tensor:
        algo = preference_objective(TrainPreferenceConfig(objective=objective, beta=BETA, **settings))
        scores = {"ref_logprobs": self.ref, BATCH_KL: torch.full_like(self.ref, KL)}
        labels = tuple(str(i) for i in range(2 * PAIRS))
        rows = RowBatch(labels=labels, loss_mask=self.mask, scores={name: scores[name] for name in algo.reads})
        sums = algo.loss(rows, PolicyOutputs(logprobs=logprobs, entropy=None), AlgoState(kl_coef=0.0))
        return sums.total({"pairs": float(PAIRS)})


class Kto(KTOTrainer):  # type: ignore[misc]  # no annotations
    """TRL's trainer, with given log-probs in place of its model's."""

    def __init__(self, pairs: Pairs, logprobs: Tensor, desirable: float, undesirable: float) -> None:
        self.pairs, self.logprobs = pairs, logprobs
        self.desirable_weight, self.undesirable_weight, self.beta = desirable, undesirable, BETA
        self.model = SimpleNamespace(training=True)
        self.accelerator = SimpleNamespace(device="cpu", gather_for_metrics=lambda values: values)
        self.aux_loss_enabled, self.precompute_ref_logps, self.calculate_KL = False, True, True
        self.loss_type, self._total_train_tokens, self._tp_size = "kto", 0, 1
        self._metrics: Any = defaultdict(lambda: defaultdict(list))

    def answer(self, *, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        """The rows of the batch, or, wider by one, those that the KL is estimated on."""
        pairs, of_kl = self.pairs, input_ids.shape[1] == WIDTH + 2
        logprobs = torch.where(pairs.mask, self.logprobs, 0.0)
        if of_kl:
            logprobs = torch.full((2 * PAIRS, WIDTH + 1), KL / (WIDTH + 1), dtype=torch.float64)
        return SimpleNamespace(
            log_probs=logprobs, entropy=torch.zeros_like(logprobs), mean_logits=torch.zeros_like(logprobs)
        )

    def loss(self) -> Tensor:
        pairs, ids, wider = self.pairs, torch.zeros(2 * PAIRS, WIDTH + 1), torch.zeros(2 * PAIRS, WIDTH + 2)
        completion = torch.nn.functional.pad(pairs.mask.long(), (1, 0))
        inputs = {
            "input_ids": ids.long(),
            "attention_mask": torch.ones_like(ids),
            "completion_mask": completion,
            "label": torch.arange(2 * PAIRS) < PAIRS,
            "ref_logps": torch.where(pairs.mask, pairs.ref, 0.0).sum(1),
            "KL_input_ids": wider.long(),
            "KL_attention_mask": torch.ones_like(wider),
            "KL_completion_mask": torch.ones_like(wider),
            "ref_KL_logps": torch.zeros(2 * PAIRS).double(),
        }
        return self._compute_loss(self.answer, inputs, return_outputs=False)


@pytest.mark.parametrize("seed", SEEDS)
def test_dpo(seed: int) -> None:
    pairs, peer = Pairs(seed), openrlhf.DPOLoss(beta=BETA)
    ref = pairs.sums(pairs.ref)
    assert_same_loss(lambda x: pairs.ours(x, "dpo"), lambda x: peer(*pairs.sums(x), *ref)[0], pairs.logprobs, FLOAT64)


@pytest.mark.parametrize("seed", SEEDS)
def test_ipo_differs_in_the_length_of_responses(seed: int) -> None:
    """Known difference: means over a response's tokens here, as in TRL, and sums in OpenRLHF, as in the paper."""
    pairs, peer = Pairs(seed), openrlhf.DPOLoss(beta=BETA, ipo=True)
    ref = pairs.means(pairs.ref)
    assert_same_loss(lambda x: pairs.ours(x, "ipo"), lambda x: peer(*pairs.means(x), *ref)[0], pairs.logprobs, FLOAT64)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("desirable", "undesirable"), [(1.0, 1.0), (1.5, 0.5)])
def test_kto(seed: int, desirable: float, undesirable: float) -> None:
    pairs = Pairs(seed)
    weights = {"desirable_weight": desirable, "undesirable_weight": undesirable}
    assert_same_loss(
        lambda x: pairs.ours(x, "kto", **weights),
        lambda x: Kto(pairs, x, desirable, undesirable).loss(),
        pairs.logprobs,
        FLOAT64,
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_orpo(seed: int) -> None:
    """TRL's odds-ratio term, and the negative log-likelihood of chosen responses: a mean over rows, where TRL has one
    over all tokens of the batch."""
    pairs = Pairs(seed)
    trainer = SimpleNamespace(beta=BETA, accelerator=SimpleNamespace(device="cpu"))

    def peer(logprobs: Tensor) -> Tensor:
        means = pairs.means(logprobs)
        return (-means[0] - ORPOTrainer.odds_ratio_loss(trainer, *means)[0]).mean()

    assert_same_loss(lambda x: pairs.ours(x, "orpo"), peer, pairs.logprobs, FLOAT32)
