"""transformers' routers, watched row by row: the balance loss by its formula, and experts forced on tokens."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel


class Routers:
    """Replaces the forward of every router by its definition. `forced`: by row, [tokens, layers, k] experts.

    uncounted: by row, how many of its first tokens do not count in the balance loss.
    """

    def __init__(
        self,
        *,
        coef: float = 0.0,
        forced: Sequence[npt.NDArray[np.int16]] | None = None,
        uncounted: Sequence[int] | None = None,
    ) -> None:
        self.coef, self.forced, self.uncounted = coef, forced, uncounted
        # By row and layer: the experts of its tokens [n, k]; and Σ_e f_e·P_e·E of the row.
        self.experts: dict[int, dict[int, torch.Tensor]] = {}
        self.balance: dict[int, dict[int, torch.Tensor]] = {}

    def attach(self, hf: PreTrainedModel) -> None:
        self.normalized = getattr(hf.config, "norm_topk_prob", True)
        self.per_token = hf.config.num_experts_per_tok
        for number, layer in enumerate(hf.model.layers):
            if hasattr(layer.mlp, "gate"):
                layer.mlp.gate.forward = partial(self._route, layer.mlp.gate.weight, number)

    def begin(self, row: int) -> None:
        self.row = row
        self.experts[row], self.balance[row] = {}, {}

    def _route(
        self, weight: torch.Tensor, layer: int, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = F.linear(hidden.reshape(-1, hidden.shape[-1]), weight)
        probabilities = logits.softmax(-1)
        own = probabilities.topk(self.per_token).indices
        if self.forced is not None:
            given = torch.from_numpy(self.forced[self.row][:, layer].astype(np.int64))
            own = torch.where(given < 0, own, given)
        weights = probabilities.gather(1, own)
        if self.normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        used = torch.zeros_like(logits).scatter(1, own, 1.0)
        counted = slice(0 if self.uncounted is None else self.uncounted[self.row], None)
        self.experts[self.row][layer] = own[counted]
        # A row of which no token counts has no mean.
        fractions, means = (each[counted].sum(0) / max(len(own[counted]), 1) for each in (used, probabilities))
        self.balance[self.row][layer] = logits.shape[1] * (fractions / self.per_token * means).sum()
        return logits, weights, own

    def balance_share(self, num_tokens: int) -> torch.Tensor:
        """Of the last row: coef · Σ_layers n/N · aux."""
        layers, experts = self.balance[self.row], self.experts[self.row]
        return self.coef * sum(layers[i] * len(experts[i]) / num_tokens for i in layers)

    def metrics(self) -> dict[str, float]:
        """What megarl reports of all rows."""
        num_tokens = sum(len(next(iter(row.values()))) for row in self.experts.values())
        layers = sorted(self.experts[0])
        aux, peaks, idle = [], [], []
        for layer in layers:
            counts = np.bincount(
                np.concatenate([row[layer].flatten().numpy() for row in self.experts.values()]), minlength=6
            )
            peaks.append(counts.max() / counts.mean())
            idle.append((counts == 0).mean())
            aux.append(
                sum(self.balance[i][layer].item() * len(row[layer]) / num_tokens for i, row in self.experts.items())
            )
        return {
            "moe/aux_loss": float(np.mean(aux)),
            "moe/load_max_over_mean": float(np.mean(peaks)),
            "moe/load_max_over_mean_worst_layer": float(np.max(peaks)),
            "moe/idle_experts": float(np.mean(idle)),
        }
