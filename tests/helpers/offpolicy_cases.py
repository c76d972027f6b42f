"""Random small inputs with edges for `offpolicy_oracle.py`. Deterministic: the same seed and n give the same cases."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

KINDS = (
    "plain",  # moderate differences between the three policies
    "far",  # log-ratios far beyond the clamp of +-20
    "equal",  # current, proximal and sampling policy are the same
    "near",  # nearly the same: log-ratios around 1e-6
    "single",  # one loss token in the whole batch
    "empty_rows",  # some rows have no loss token
    "no_tokens",  # no loss token at all
    "peaked",  # probabilities near 0 and near 1
    "zero_advantage",  # all advantages are 0
    "one_sign",  # all advantages have the same sign
    "holes",  # masks with gaps, as between turns
    "full_head",  # the recorded head is the whole vocabulary
    "ties",  # repeated logits: equal entropies and equal probabilities
)


@dataclass
class Case:
    """One batch. B rows, T tokens, V ids, k head entries. Float tensors are float64, masks boolean."""

    kind: str
    logits: Tensor  # [B, T, V] current policy; call requires_grad_() for gradients
    old_logits: Tensor  # [B, T, V] proximal policy
    roll_logits: Tensor  # [B, T, V] sampler
    tokens: Tensor  # [B, T] sampled ids
    mask: Tensor  # [B, T] loss tokens
    observation_mask: Tensor  # [B, T] tool replies, disjoint from mask
    advantage: Tensor  # [B]
    token_advantage: Tensor  # [B, T]
    returns: Tensor  # [B, T] reward to go
    groups: Tensor  # [B] group of a row
    rho_bar: Tensor  # [B, T] positive token weights
    log_tis: Tensor  # [B, T] log of truncated importance weights, at most log 2
    ref: Tensor  # [B, T] reference log-probs
    log_z: Tensor  # [B]
    head_ids: Tensor  # [B, T, k] distinct ids
    head_mask: Tensor  # [B, T, k] which entries are real
    support: Tensor  # [B, T, V] nucleus that contains the sampled token
    topk: int

    def at_tokens(self, logits: Tensor) -> Tensor:
        """Log-probs of the sampled ids under `logits`, [B, T]."""
        return logits.log_softmax(-1).gather(-1, self.tokens.unsqueeze(-1)).squeeze(-1)

    @property
    def old(self) -> Tensor:
        return self.at_tokens(self.old_logits)

    @property
    def roll(self) -> Tensor:
        return self.at_tokens(self.roll_logits)

    @property
    def head_logq(self) -> Tensor:
        """Sampler's log-probs at the head, normalised over the whole vocabulary, [B, T, k]."""
        return self.roll_logits.log_softmax(-1).gather(-1, self.head_ids)


def cases(seed: int, n: int) -> Iterator[Case]:
    """Yield `n` cases; the kinds of KINDS come round in turn."""
    generator = torch.Generator().manual_seed(seed)
    for index in range(n):
        yield _case(KINDS[index % len(KINDS)], generator)


def _case(kind: str, g: torch.Generator) -> Case:
    def whole(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=g))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    def chance(p: float, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=g, dtype=torch.float64) < p

    rows, width, vocab = whole(1, 5), whole(1, 7), whole(2, 12)
    shape = (rows, width, vocab)
    spread = {"far": 40.0, "peaked": 12.0}.get(kind, 1.5)
    shift = {"far": 40.0, "equal": 0.0, "near": 1e-6, "peaked": 3.0}.get(kind, 0.4)
    roll = spread * normal(*shape)
    if kind == "ties":
        roll = roll.round()
    old = roll + shift * normal(*shape)
    now = old + shift * normal(*shape)
    if kind == "ties":
        old, now = old.round(), now.round()

    # Most tokens come from the sampler, some from anywhere (so the sampled id may be very unlikely).
    drawn = torch.multinomial(roll.softmax(-1).reshape(-1, vocab), 1, generator=g).reshape(rows, width)
    anywhere = torch.randint(0, vocab, (rows, width), generator=g)
    tokens = torch.where(chance(0.25, rows, width), anywhere, drawn)

    lengths = torch.randint(1, width + 1, (rows, 1), generator=g)
    mask = torch.arange(width).expand(rows, width) < lengths
    if kind == "holes":
        mask = mask & chance(0.6, rows, width)
    elif kind == "single":
        mask = torch.zeros_like(mask)
        mask[whole(0, rows - 1), whole(0, width - 1)] = True
    elif kind == "empty_rows":
        mask = mask & chance(0.5, rows, 1)
    elif kind == "no_tokens":
        mask = torch.zeros_like(mask)
    observation = ~mask & chance(0.5, rows, width)

    advantage, token_advantage = normal(rows), normal(rows, width)
    if kind == "zero_advantage":
        advantage, token_advantage = torch.zeros_like(advantage), torch.zeros_like(token_advantage)
    elif kind == "one_sign":
        sign = 1.0 if whole(0, 1) else -1.0
        advantage, token_advantage = sign * advantage.abs(), sign * token_advantage.abs()
    else:  # a few exact zeros everywhere
        advantage = advantage.masked_fill(chance(0.1, rows), 0.0)
        token_advantage = token_advantage.masked_fill(chance(0.1, rows, width), 0.0)

    k = vocab if kind == "full_head" else whole(1, vocab)
    head_ids = roll.topk(k, dim=-1).indices
    head_mask = torch.ones(rows, width, k, dtype=torch.bool)
    if kind != "full_head":  # ragged heads: a real prefix of at least one
        sizes = torch.randint(1, k + 1, (rows, width, 1), generator=g)
        head_mask = torch.arange(k).expand(rows, width, k) < sizes

    size = whole(1, vocab)
    support = torch.zeros(shape, dtype=torch.bool).scatter(-1, roll.topk(size, dim=-1).indices, True)
    support = support.scatter(-1, tokens.unsqueeze(-1), True)

    return Case(
        kind=kind,
        logits=now,
        old_logits=old,
        roll_logits=roll,
        tokens=tokens,
        mask=mask,
        observation_mask=observation,
        advantage=advantage,
        token_advantage=token_advantage,
        returns=normal(rows, width),
        groups=torch.randint(0, 2, (rows,), generator=g),
        rho_bar=normal(rows, width).exp(),
        log_tis=normal(rows, width).clamp(max=math.log(2.0)),
        ref=-normal(rows, width).abs(),
        log_z=normal(rows),
        head_ids=head_ids,
        head_mask=head_mask,
        support=support,
        topk=whole(1, vocab),
    )
