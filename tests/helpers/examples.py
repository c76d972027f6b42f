"""Names that the examples in docstrings may use besides those of their module: short ways to make inputs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import megarl.config.algo
from megarl.algos.corrections import LogRatios
from megarl.algos.cpo.formulas import Terms, make_terms
from megarl.algos.cpo.inputs import CpoInputs
from megarl.algos.policy_losses import PolicyLossInputs
from megarl.algos.preference import PairLogprobs
from megarl.config.algo import CpoConfig
from megarl.config.algo.compose import EntropyConfig
from megarl.types import PolicyOutputs, Row, RowBatch, ScoredBatch


def tensor(values: Any) -> Tensor:
    """A tensor of float64, or of bool where values are."""
    made = torch.tensor(values)
    return made if made.dtype == torch.bool else made.double()


def step(
    uids: str, rewards: Sequence[float], mask: Any = None, truncated: Any = None, **quantities: Any
) -> ScoredBatch:
    """The rows of a step, one letter of `uids` for each; rewards above 0.5 are correct, and all tokens are loss tokens
    unless `mask` says which."""
    padded = {name: tensor(values) for name, values in quantities.items()}
    shape = next((values.shape for values in padded.values()), (len(uids), 1))
    return ScoredBatch(
        uids=tuple(uids),
        rewards=tensor(rewards),
        correct=tensor(rewards) > 0.5,
        loss_mask=torch.ones(shape, dtype=torch.bool) if mask is None else torch.tensor(mask).bool(),
        quantities=padded,
        truncated=None if truncated is None else torch.tensor(truncated),
    )


def row(mask: Sequence[int], **quantities: Sequence[float]) -> Row:
    """A row of one prompt token and the response that `mask` describes."""
    return Row(
        uid="a",
        sample_index=0,
        token_ids=np.arange(len(mask) + 1),
        num_prompt_tokens=1,
        loss_mask=np.array(mask, np.bool_),
        quantities={name: np.array(values, np.float32) for name, values in quantities.items()},
    )


def rows(mask: Any, **quantities: Any) -> RowBatch:
    """Rows of a micro-batch, whose loss tokens `mask` marks."""
    padded = {name: tensor(values) for name, values in quantities.items()}
    return RowBatch(
        labels=tuple(f"a/{i}" for i in range(len(mask))), loss_mask=torch.tensor(mask).bool(), quantities=padded
    )


def outputs(logprobs: Any, *, divergence: Any = None, **comparison: Any) -> PolicyOutputs:
    """A policy's log-probs, without entropies; and what a head finds beside a teacher."""
    return PolicyOutputs(
        logprobs=tensor(logprobs),
        entropy=None,
        divergence=None if divergence is None else tensor(divergence),
        comparison={name: tensor(values) for name, values in comparison.items()},
    )


def loss_inputs(ratio: Any, advantages: Any) -> PolicyLossInputs:
    """Tokens of old log-prob −1 whose probability changed by `ratio`."""
    values = tensor(ratio)
    return PolicyLossInputs(
        logprobs=values.log() - 1,
        old_logprobs=torch.full_like(values, -1.0),
        advantages=tensor(advantages),
        loss_mask=torch.ones_like(values, dtype=torch.bool),
    )


def ratios(values: Any) -> LogRatios:
    """Ratios ρ of tokens that the engine sampled."""
    return LogRatios(token=tensor(values).log(), sampled=torch.ones_like(tensor(values), dtype=torch.bool))


def terms(
    delta: Any, *, old: float = -3.0, correct: bool = True, difficulty: int = 0, advantages: Any = None, **given: Any
) -> Terms:
    """A row whose hint changes log-probs of `old` by `delta`, with vocabulary 10; what else is given is an entropy, or
    settings of `CpoConfig`, whose estimator of mutual information is `pmi`."""
    change = tensor(delta)
    inputs = CpoInputs(
        advantages=torch.ones_like(change) if advantages is None else tensor(advantages),
        loss_mask=torch.ones_like(change, dtype=torch.bool),
        correct=torch.tensor([correct] * len(change)),
        difficulty=torch.tensor([difficulty] * len(change)),
        vocab_size=10,
        old_logprobs=torch.full_like(change, old),
        hint_logprobs=change + old,
        entropy=tensor(given.pop("entropy", torch.zeros_like(change).tolist())),
    )
    cfg = CpoConfig(**{"mi_estimator": "pmi", **given})
    return make_terms(inputs, cfg, neg_scope="negative_sample", uses_hint=True, uses_entropy=True)


def pairs(log_ratios: Any, *, logprobs: Any = None, num_tokens: Any = None) -> PairLogprobs:
    """Responses of pairs, [chosen, rejected], of one token each and with a KL of 0 unless given."""
    values = tensor(log_ratios)
    return PairLogprobs(
        logprobs=values if logprobs is None else tensor(logprobs),
        log_ratios=values,
        num_tokens=torch.ones_like(values) if num_tokens is None else torch.tensor(num_tokens),
        kl=torch.zeros_like(values),
    )


NAMES = {
    **{name: getattr(megarl.config.algo, name) for name in dir(megarl.config.algo) if name.endswith("Config")},
    **{made.__name__: made for made in (EntropyConfig, replace, tensor, step, row, rows, outputs)},
    **{made.__name__: made for made in (loss_inputs, pairs, ratios, terms)},
}
