"""The load of experts over an optimizer mini-batch, on all ranks."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from megarl.device.platform import platform
from megarl.parallel.moe.balance import load_metrics
from megarl.parallel.moe.router import moe_layers
from megarl.parallel.roles import LoadedRole
from megarl.types import Rows
from megarl.types.messages import Role


class MiniBatchLoad:
    """Routers count from the construction until `metrics`; of a model without experts both do nothing."""

    def __init__(
        self, loaded: LoadedRole, rows: Rows, micro_batches: Sequence[Sequence[int]], dp_group: dist.ProcessGroup
    ) -> None:
        self._role, self._experts = loaded.spec.role, loaded.model_spec.dims.experts
        if self._experts is None:
            return
        self._layers = list(moe_layers(loaded.chunks))
        count = torch.tensor(sum(rows[i].num_tokens for batch in micro_batches for i in batch))
        count = count.to(platform().device())
        if dp_group.size() > 1:
            dist.all_reduce(count, group=dp_group)
        self._num_tokens = max(int(count), 1)
        for layer in self._layers:
            layer.router.begin(aux_loss_scale=loaded.spec.settings.moe.aux_loss_coef / self._num_tokens)

    def metrics(self) -> Mapping[str, float]:
        """Metrics of the mini-batch, the same on every rank; those of a critic under its name."""
        if self._experts is None:
            return {}
        place = {layer: i for i, layer in enumerate(self._experts.layers)}
        device = platform().device()
        # A column of every expert, and one of the balance. Each rank has its layers, and of these its tokens.
        sums = torch.zeros(len(place), self._experts.num + 1, dtype=torch.float64, device=device)
        for layer in self._layers:
            row = sums[place[layer.layer_number - 1]]
            row[:-1] += layer.router.loads
            row[-1] += layer.router.balance
        dist.all_reduce(sums)
        prefix = "" if self._role is Role.ACTOR else f"{self._role}/"
        found = load_metrics(sums[:, :-1].cpu(), sums[:, -1].cpu(), self._num_tokens)
        return {f"{prefix}{name}": value for name, value in found.items()}
