"""Steps of policies, critics and reward models in transformers and plain torch, float64, one row at a time, dense.

Written from the formulas, without anything of megarl's training side.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification, PreTrainedModel, Qwen3ForSequenceClassification

from megarl.types import Row
from tests.helpers.checkpoints import load_hf

CLIP_LOW, CLIP_HIGH, DUAL_CLIP, MAX_K3 = 0.2, 0.2, 3.0, 10.0
ROW_CLIP, TAU_POS, TAU_NEG, KL_COEF = 0.01, 1.5, 2.0, 0.7


def dense_loss(name: str, logprobs: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor, row: Row) -> torch.Tensor:
    """[R] policy loss of a row's tokens, with the settings above."""
    mask, log_ratio = torch.from_numpy(row.loss_mask), logprobs - old
    ratio = torch.exp(log_ratio)
    if name == "gspo":
        ratio = torch.exp(log_ratio[mask].mean()).expand_as(logprobs)
        return -torch.min(ratio * advantage, ratio.clamp(1 - ROW_CLIP, 1 + ROW_CLIP) * advantage)
    if name == "gmpo":
        positive = torch.min(log_ratio, torch.tensor(CLIP_HIGH, dtype=log_ratio.dtype))
        negative = torch.max(log_ratio, torch.tensor(-CLIP_LOW, dtype=log_ratio.dtype))
        return -torch.exp(torch.where(advantage > 0, positive, negative)[mask].mean()) * advantage
    if name == "sapo":
        gates = [4 / tau / (1 + torch.exp(-tau * (ratio - 1))) for tau in (TAU_POS, TAU_NEG)]
        return -torch.where(advantage > 0, *gates) * advantage
    if name == "kl_cov":
        chosen = torch.from_numpy(row.quantities["chosen_by_covariance"])
        return -ratio * advantage + chosen * KL_COEF * log_ratio.abs()
    loss = -torch.min(ratio * advantage, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantage)
    if name == "clip_cov":
        return loss * (1 - torch.from_numpy(row.quantities["chosen_by_covariance"]))
    return torch.where(advantage < 0, torch.min(loss, -DUAL_CLIP * advantage), loss)


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """loss = agg(policy) + kl_coef·agg(k3) − entropy_coef·agg(entropy), agg over tokens or over rows' token means, and
    − echo_coef · the mean log-prob of observed tokens."""

    per_row: bool
    entropy_coef: float
    kl_coef: float
    temperature: float
    policy_loss: str = "ppo_clip"
    echo_coef: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamSettings:
    """AdamW on gradients of a clipped norm; vectors are not decayed."""

    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip_grad_norm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseStep:
    """Loss, gradient norm before clipping and [R] log-probs or values before the step; weights after it."""

    loss: float
    grad_norm: float
    before: list[np.ndarray]
    weights: dict[str, torch.Tensor]


class DenseTrainer:
    """A model and its optimizer; subclasses say what a row loses. `per_row`: a mean of rows' means, not of tokens."""

    def __init__(
        self, model: PreTrainedModel, adam: AdamSettings, *, per_row: bool = False, echo_coef: float = 0.0
    ) -> None:
        self.model, self.adam, self.per_row, self.echo_coef = model, adam, per_row, echo_coef
        parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in parameters if p.ndim > 1], "weight_decay": adam.weight_decay},
                {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
            ],
            betas=adam.betas,
            eps=adam.eps,
        )

    def step(self, rows: Sequence[Row], lr: float) -> DenseStep:
        self.optimizer.zero_grad()
        loss, before = self._backward(rows)
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        grad_norm = torch.sqrt(sum(g.square().sum() for g in grads)).item()
        for grad in grads:
            grad.mul_(min(1.0, self.adam.clip_grad_norm / (grad_norm + 1e-6)))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        weights = {name: value.clone() for name, value in self.model.state_dict().items()}
        return DenseStep(loss=loss, grad_norm=grad_norm, before=before, weights=weights)

    def _backward(self, rows: Sequence[Row]) -> tuple[float, list[np.ndarray]]:
        """Gradients of the loss; the loss, and what the model says of every row."""
        num_tokens = sum(int(row.loss_mask.sum()) for row in rows)
        num_rows = sum(bool(row.loss_mask.any()) for row in rows)
        num_observed = sum(row.quantities["observed"].sum() for row in rows) if self.echo_coef else 0
        loss, before = 0.0, []
        for row in rows:
            token_losses, said = self._row(row)
            before.append(np.where(row.loss_mask, said.detach().numpy(), 0.0))
            if not row.loss_mask.any() and not self.echo_coef:
                continue
            kept = token_losses[torch.from_numpy(row.loss_mask)]
            part = kept.mean() / num_rows if self.per_row else kept.sum() / num_tokens
            if self.echo_coef:
                observed = torch.from_numpy(row.quantities["observed"]).bool()
                part = part - self.echo_coef * said[observed].sum() / num_observed
            part.backward()
            loss += part.item()
        return loss, before

    def _row(self, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
        """[R] loss of every response token, and what the model says of it."""
        raise NotImplementedError


class DensePolicy(DenseTrainer):
    """A policy under one of the policy-gradient objectives."""

    def __init__(self, path: Path, objective: Objective, adam: AdamSettings) -> None:
        model = load_hf(path, torch.float64)
        super().__init__(model, adam, per_row=objective.per_row, echo_coef=objective.echo_coef)
        self.objective = objective

    def _row(self, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.from_numpy(row.token_ids)
        logits = self.model(tokens[None]).logits[0, row.num_prompt_tokens - 1 : -1] / self.objective.temperature
        log_p = F.log_softmax(logits, dim=-1)
        outside = torch.zeros_like(log_p, dtype=torch.bool)
        for place, ids in zip(outside, [] if row.nucleus is None else row.nucleus.tolist(), strict=False):
            kept = [v for v in ids if v >= 0]
            place[[v for v in range(len(place)) if kept and v not in kept]] = True
        within = F.log_softmax(logits.masked_fill(outside, -torch.inf), dim=-1)
        logprobs = within[torch.arange(len(log_p)), tokens[row.num_prompt_tokens :]]
        advantage, old, ref = (
            torch.from_numpy(row.quantities[name]).double() for name in ("advantages", "old_logprobs", "ref_logprobs")
        )
        policy = dense_loss(self.objective.policy_loss, logprobs, old, advantage, row)
        kl = (torch.exp(ref - logprobs) - (ref - logprobs) - 1).clamp(max=MAX_K3)
        entropy = -(log_p.exp() * log_p).sum(-1)
        losses = policy + self.objective.kl_coef * kl - self.objective.entropy_coef * entropy
        return losses, logprobs


class DenseCritic(DenseTrainer):
    """A critic: ½·max((v − R)², (v_old + clip(v − v_old, ±clip) − R)²), v a linear map of the last hidden state of
    the tokens before the one that is valued."""

    def __init__(self, path: Path, adam: AdamSettings, *, clip: float) -> None:
        super().__init__(Qwen3ForSequenceClassification.from_pretrained(path, dtype=torch.float64), adam)
        self.clip = clip

    def values(self, row: Row) -> torch.Tensor:
        """[R], masked tokens too."""
        hidden = self.model.model(torch.from_numpy(row.token_ids)[None]).last_hidden_state[0]
        return self.model.score(hidden[row.num_prompt_tokens - 1 : -1])[:, 0]

    def _row(self, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
        values = self.values(row)
        returns, old = (torch.from_numpy(row.quantities[name]).double() for name in ("returns", "values"))
        near_old = old + (values - old).clamp(-self.clip, self.clip)
        return 0.5 * torch.maximum((values - returns) ** 2, (near_old - returns) ** 2), values


class DenseRewardModel(DenseTrainer):
    """A reward model: the mean over pairs of −log σ(chosen − rejected − margin), its scores as transformers pools them.

    Rows are prompts: the chosen of all pairs, then the rejected, each followed by a token that does not count.
    """

    def __init__(self, path: Path, adam: AdamSettings) -> None:
        super().__init__(AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float64), adam)

    def score(self, row: Row) -> torch.Tensor:
        tokens = torch.from_numpy(row.token_ids[: row.num_prompt_tokens])
        return self.model(tokens[None]).logits[0, 0]

    def _backward(self, rows: Sequence[Row]) -> tuple[float, list[np.ndarray]]:
        count = len(rows) // 2
        loss, before = 0.0, {}
        for i in range(count):
            chosen, rejected = self.score(rows[i]), self.score(rows[count + i])
            part = -F.logsigmoid(chosen - rejected - float(rows[i].quantities["margin"][0])) / count
            part.backward()
            loss += part.item()
            before |= {i: chosen, count + i: rejected}
        return loss, [before[i].detach().numpy()[None] for i in range(len(rows))]


class DensePreference(DenseTrainer):
    """A policy on preference pairs: the chosen rows of all pairs, then the rejected. The losses are those of the
    papers, with sums of log-probs for dpo and kto, means for ipo and orpo, and the KL that rows state."""

    def __init__(self, path: Path, adam: AdamSettings, *, objective: str, beta: float) -> None:
        super().__init__(load_hf(path, torch.float64), adam)
        self.objective, self.beta = objective, beta

    def logprobs(self, row: Row) -> torch.Tensor:
        tokens = torch.from_numpy(row.token_ids)
        log_p = F.log_softmax(self.model(tokens[None]).logits[0, row.num_prompt_tokens - 1 : -1], dim=-1)
        return log_p[torch.arange(len(log_p)), tokens[row.num_prompt_tokens :]]

    def pair_loss(self, sides: tuple[torch.Tensor, torch.Tensor], rows: tuple[Row, Row]) -> torch.Tensor:
        beta = self.beta
        if self.objective == "orpo":
            p_chosen, p_rejected = (side.mean().exp() for side in sides)
            odds_ratio = p_chosen / (1 - p_chosen) / (p_rejected / (1 - p_rejected))
            return -p_chosen.log() - beta * (odds_ratio / (1 + odds_ratio)).log()
        c, r = (
            side - torch.from_numpy(row.quantities["ref_logprobs"]).double()
            for side, row in zip(sides, rows, strict=True)
        )
        if self.objective == "ipo":
            return (c.mean() - r.mean() - 0.5 / beta) ** 2
        if self.objective == "dpo":
            return torch.log1p(torch.exp(beta * (r.sum() - c.sum())))
        kl = float(rows[0].quantities["batch_kl"][0])
        wanted, unwanted = torch.sigmoid(beta * (c.sum() - kl)), torch.sigmoid(beta * (kl - r.sum()))
        return ((1 - wanted) + (1 - unwanted)) / 2

    def _backward(self, rows: Sequence[Row]) -> tuple[float, list[np.ndarray]]:
        count = len(rows) // 2
        loss, before = 0.0, {}
        for i in range(count):
            pair = rows[i], rows[count + i]
            chosen, rejected = self.logprobs(pair[0]), self.logprobs(pair[1])
            part = self.pair_loss((chosen, rejected), pair) / count
            part.backward()
            loss += part.item()
            before |= {i: chosen, count + i: rejected}
        return loss, [before[i].detach().numpy() for i in range(len(rows))]


class DenseSft(DenseTrainer):
    """A policy that imitates: the mean of −log-prob over the tokens of all rows that count."""

    def __init__(self, path: Path, adam: AdamSettings) -> None:
        super().__init__(load_hf(path, torch.float64), adam)

    def logprobs(self, row: Row) -> torch.Tensor:
        """[R], masked tokens too."""
        tokens = torch.from_numpy(row.token_ids)
        log_p = F.log_softmax(self.model(tokens[None]).logits[0, row.num_prompt_tokens - 1 : -1], dim=-1)
        return log_p[torch.arange(len(log_p)), tokens[row.num_prompt_tokens :]]

    def _row(self, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = self.logprobs(row)
        return -logprobs, logprobs
