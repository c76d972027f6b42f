"""A loop of plain torch on a model of transformers, float32, a row at a time: what a session is compared with."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

from megarl.types import Row
from tests.helpers.checkpoints import load_hf

CLIP, DUAL_CLIP = 0.2, 3.0


def token_losses(name: str, logprobs: torch.Tensor, row: Row) -> torch.Tensor:
    """[R] losses of a row's tokens, from the formulas."""
    given = {name: torch.from_numpy(values) for name, values in row.quantities.items()}
    if name == "cross_entropy":
        return -logprobs
    if name == "importance_sampling":
        return -given["correction"] * torch.exp(logprobs - given["rollout_logprobs"]) * given["advantages"]
    assert name == "ppo_clip"
    advantages, ratio = given["advantages"], torch.exp(logprobs - given["old_logprobs"])
    losses = -torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return torch.where(advantages < 0, torch.min(losses, -DUAL_CLIP * advantages), losses)


class TorchLoop:
    """Accumulates means over all loss tokens of `rows`; `optimizer` is one of torch's, or AdamW by default."""

    def __init__(self, path: Path, *, weight_decay: float = 0.0, eps: float = 1e-8, sgd: bool = False) -> None:
        self.model = load_hf(path)
        # Random rows may have its padding token, which is a token like any other here.
        self.model.get_input_embeddings().padding_idx = None
        parameters = list(self.model.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, eps=eps)
        if sgd:
            self.optimizer = torch.optim.SGD(parameters, lr=1.0)

    def logprobs(self, row: Row) -> torch.Tensor:
        """[R], masked tokens too."""
        tokens = torch.from_numpy(row.token_ids).long()
        log_p = F.log_softmax(self.model(tokens[None]).logits[0, row.num_prompt_tokens - 1 : -1], dim=-1)
        return log_p[torch.arange(len(log_p)), torch.from_numpy(row.label_ids).long()]

    def accumulate(self, rows: Sequence[Row], name: str) -> float:
        count, total = sum(row.num_loss_tokens for row in rows), 0.0
        for row in rows:
            loss = token_losses(name, self.logprobs(row), row)[torch.from_numpy(row.loss_mask)].sum() / count
            loss.backward()
            total += loss.item()
        return total

    def step(self, lr: float, *, betas: tuple[float, float] = (0.9, 0.95), clip: float = 1.0) -> float:
        """Return the norm before the clip."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
            if "betas" in group:
                group["betas"] = betas
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)

    def weights(self) -> Mapping[str, torch.Tensor]:
        return self.model.state_dict()
