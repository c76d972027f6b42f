"""Define the norms of megarl's layers: before attention and MLP, after them, and of queries and keys over all heads."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from megarl.weights.rules import Family


class _RMSNormFunction(torch.autograd.Function):
    """RMSNorm, y = scale · (x / sqrt(mean(x²) + ε)); it saves only x and one number per row for backward.

    With u = x / sqrt(mean(x²) + ε) and v = scale · dy:  dx = (v − u · mean(u · v)) / sqrt(mean(x²) + ε), and
    dscale = Σ dy · u. The forward pass rounds u to the dtype of `scale` before multiplying it by `scale`. With a group,
    each of its ranks has an equal part of every row, and both means are those of whole rows.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, scale: torch.Tensor, eps: float, group: dist.ProcessGroup | None
    ) -> torch.Tensor:
        wide = x.float()
        inverse = _mean_of_rows(wide.pow(2).mean(-1, keepdim=True), group).add_(eps).rsqrt_()
        ctx.save_for_backward(x, scale, inverse)
        ctx.group = group
        return ((wide * inverse).to(scale.dtype) * scale).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        x, scale, inverse = ctx.saved_tensors
        gradient, normed = gradients[0].float(), x.float() * inverse
        of_scale = (gradient * normed).flatten(0, -2).sum(0)
        of_normed = gradient * scale.float()
        mean = _mean_of_rows(torch.linalg.vecdot(of_normed, normed).unsqueeze(-1) / x.shape[-1], ctx.group)
        return of_normed.sub_(normed.mul_(mean)).mul_(inverse).to(x.dtype), of_scale.to(scale.dtype), None, None


def _mean_of_rows(mean: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return the means of whole rows, given those of this rank's parts, which may be overwritten."""
    if group is None or group.size() == 1:
        return mean
    dist.all_reduce(mean, group=group)
    return mean.div_(group.size())


class RMSNorm(torch.nn.Module):
    """RMSNorm y = w · x / sqrt(mean(x²) + ε) over the last dimension (Zhang & Sennrich 2019); statistics are float32.

    If Megatron's configuration centres norm weights at zero (Gemma), 1 + w replaces w, in float32. Under sequence
    parallelism each rank sees only part of the tokens; so the weight is marked for Megatron to all-reduce its gradient
    over tensor-parallel ranks.
    """

    group: dist.ProcessGroup | None = None

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: object) -> None:
        super().__init__()
        self.eps, self.adds_one = eps, config.layernorm_zero_centered_gamma
        initial = torch.zeros if self.adds_one else torch.ones
        self.weight = torch.nn.Parameter(initial(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = 1 + self.weight.float() if self.adds_one else self.weight
        normed: torch.Tensor = _RMSNormFunction.apply(x, scale, self.eps, self.group)
        return normed


class ResidualNorm(RMSNorm):
    """The norm of what attention or an MLP adds to the residual stream (OLMo 2, Gemma 2): r + norm(x).

    It takes the place of Megatron's function that adds both, which layers call in the same way.
    """

    def forward(self, training: bool, fused: bool) -> Callable[..., torch.Tensor]:  # type: ignore[override]
        """Return the function that Megatron's layers call with (x, bias), the residual and a dropout of 0."""

        def add(output: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, _: float) -> torch.Tensor:
            x, bias = output
            return residual + super(ResidualNorm, self).forward(x if bias is None else x + bias)

        return add


class WideNorm(RMSNorm):
    """RMSNorm of queries or keys over all heads together (OLMo 2, MiniMax-M2).

    Each tensor-parallel rank has the weights of its own heads. Every output depends on every head, so the ranks sum
    squares in the forward pass, and in the backward pass what the squares' gradients are made of. The weight's own
    gradient is complete, since a rank sees its heads at all tokens.
    """

    def __init__(self, config: TransformerConfig, width: int, *, group: dist.ProcessGroup) -> None:
        """Make the norm of a rank's heads, which have `width` numbers together."""
        super().__init__(config, width, config.layernorm_epsilon)
        self.group = group
        self.weight.sequence_parallel = False  # type: ignore[attr-defined]
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise [..., this rank's heads, head size]."""
        return super().forward(x.flatten(-2)).view(x.shape)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[object, ...] = (), metadata: dict[str, object] | None = None
    ) -> ShardedStateDict:
        """Describe the weight's shard for checkpoints; Megatron takes other modules' weights to be whole."""
        assert metadata is not None
        weights = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(
            weights, prefix, {"weight": 0}, sharded_offsets, tp_group=self.group, dp_cp_group=metadata["dp_cp_group"]
        )


def set_norms(layer: ModuleSpec, family: Family, config: TransformerConfig) -> None:
    """Set the norms of a family with norms after attention and MLP in the spec of a layer, in place."""
    parts = layer.submodules
    if family.norms_after:
        sizes = {"hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        parts.self_attn_bda = parts.mlp_bda = ModuleSpec(module=ResidualNorm, params={"config": config, **sizes})
    if not family.norms_before:
        parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp
