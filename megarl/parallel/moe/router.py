"""Route a pack's tokens with Megatron's router, extended by a balance loss per row and by replay of recorded experts.

Before each forward, also the one that recomputes activations in backward, a layer tells its router the pack. So any
number of micro-batches may be in flight.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.tensor_parallel.random import checkpoint, get_cuda_rng_tracker
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer

from megarl.config.models import fused_kernels, transformer_engine_version
from megarl.config.schema import LayoutConfig, MoeConfig
from megarl.host.device.platform import platform
from megarl.parallel.backend import module_spec
from megarl.parallel.moe.routing import ExpertChoice, balance_loss, load_metrics, row_sums
from megarl.parallel.packing import Pack, PackSeqParams
from megarl.types import Rows
from megarl.weights.dims import Dims, Experts


def expert_options(dims: Dims, layout: LayoutConfig, config: MoeConfig) -> dict[str, object]:
    """Return the fields of Megatron's configuration for experts, or {} for a dense model."""
    experts = dims.experts
    if experts is None:
        return {}
    num_groups = experts.routing.num_groups if experts.routing is not None else 1
    fused = fused_kernels(config, engine=transformer_engine_version(), num_groups=num_groups)
    with_experts = [int(layer in experts.layers) for layer in range(dims.num_layers)]
    options: dict[str, object] = {
        "num_moe_experts": experts.num,
        "moe_router_topk": experts.per_token,
        "moe_ffn_hidden_size": experts.ffn,
        # Megatron stacks layers in checkpoints unless a list says which of them have experts.
        "moe_layer_freq": 1 if dims.has_equal_layers else with_experts,
        # The softmax is over all experts, or else over the chosen ones, which equals normalising their probabilities.
        "moe_router_pre_softmax": not experts.normalized,
        "moe_router_dtype": "fp32",
        # We compute the balance loss: Megatron's depends on the micro-batches, and is divided by tokens at the end.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "moe_shared_expert_intermediate_size": experts.shared_ffn or None,
        "moe_shared_expert_gate": experts.gates_shared,
        "moe_permute_fusion": fused["fuse_permute"],
        "moe_router_fusion": fused["fuse_router"],
    }
    if config.dispatcher == "deepep":
        options |= {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "deepep"}
    if config.grouped_gemm is not None:
        options["moe_grouped_gemm"] = config.grouped_gemm
    if (routing := experts.routing) is not None:
        options |= {
            "moe_router_score_function": "sigmoid" if routing.biased else "softmax",
            "moe_router_enable_expert_bias": routing.biased,
            # Pre-training moves the bias towards balance; here it stays as it was read.
            "moe_router_bias_update_rate": 0.0,
            "moe_router_topk_scaling_factor": routing.scale,
            "moe_router_num_groups": routing.num_groups if num_groups > 1 else None,
            "moe_router_group_topk": routing.groups_per_token if num_groups > 1 else None,
        }
    return options


class ExpertOutput(RowParallelLinear):
    """The last layer of an expert on one rank, to whose output Megatron adds the expert's bias in place.

    Where all experts are on one rank, the output would be that of a sum over one rank: a view, which must not change.
    """

    def __init__(self, *arguments: object, **named: object) -> None:
        super().__init__(*arguments, **named)
        self.explicit_expert_comm = True


def prepare_experts(chunks: Sequence[torch.nn.Module], config: MoeConfig) -> None:
    """Set up Mixture-of-Experts layers before DDP wraps the model: reduce expert gradients over the group `expert_dp`
    only (Megatron's `allreduce = False`), and freeze the routers if `config.freeze_router` is set.
    """
    for layer in moe_layers(chunks):
        for parameter in layer.experts.parameters():
            # Unless experts are split, Megatron treats them as replicated over data-parallel ranks. But even without
            # expert parallelism their replicas are the ranks of `expert_dp`, which may be more.
            parameter.allreduce = False
            # Megatron takes a bias of the last layer, which it marks as any other of its class, for one that all
            # tensor-parallel ranks have: it would sum its gradient over them, and count it in the norm only on the
            # first of them.
            parameter.sequence_parallel = False
            parameter.tensor_model_parallel = True
        if config.freeze_router:
            layer.router.requires_grad_(False)


if not hasattr(moe_utils, "te_general_gemm"):
    # Megatron reads this name always, but defines it only if Transformer Engine is installed.
    moe_utils.te_general_gemm = None


class PackRouter(TopKRouter):
    """Megatron's top-k router for packs (micro-batches as one sequence). It also counts the tokens that each expert
    gets.

    pack: the pack of the next forward; its layer sets it. `begin` starts an optimizer mini-batch. At its end, `sums`
    holds for each micro-batch what `row_sums` gives of this rank's tokens, as [2, rows, E].
    """

    def __init__(self, *arguments: object, **named: object) -> None:
        super().__init__(*arguments, **named)
        self.pack: Pack | None = None
        self.group_rating = 1
        self.begin(aux_loss_scale=0.0)

    def begin(self, *, aux_loss_scale: float) -> None:
        """Reset the sums of a mini-batch, in whose loss Σ_r n_r · aux(r) has the weight `aux_loss_scale`."""
        self._aux_loss_scale = aux_loss_scale
        self.sums: list[torch.Tensor] = []

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each token's routing weights (0 for experts not chosen) and bool choices, both [T, E]."""
        assert self.pack is not None, "a router needs the pack that its input belongs to"
        forced = self.pack.routed_experts
        # Layers count from 1.
        mine = None if forced is None else self._own_tokens(forced[:, self.layer_number - 1])
        self.router_replay = ExpertChoice(group_rating=self.group_rating, forced=mine)
        weights, routing_map = super().routing(logits)
        if torch.is_grad_enabled():
            weights = self._count(logits.flatten(0, 1), weights, routing_map)
        return weights, routing_map

    def _count(self, logits: torch.Tensor, weights: torch.Tensor, routing_map: torch.Tensor) -> torch.Tensor:
        """Add this forward's tokens to the mini-batch's sums; return `weights` with the balance loss in their graph.

        It is called only in forwards with gradients, so a layer that is recomputed in backward counts only once.
        """
        assert self.pack is not None
        with torch.set_grad_enabled(self._aux_loss_scale > 0):
            # [T, E] over all experts, adding up to 1.
            if self.score_function == "softmax":
                probabilities = logits.softmax(-1, dtype=torch.float32)
            else:
                scores = logits.float().sigmoid()
                probabilities = scores / scores.sum(-1, keepdim=True)
            members = probabilities.new_zeros(self.pack.input_ids.shape[1], self.pack.batch_shape[0])
            rows, tokens = self.pack.counted
            members[tokens, rows] = 1
            loads, summed = row_sums(routing_map, probabilities, self._own_tokens(members))
        self.sums.append(torch.stack([loads, summed.detach()]))
        if self._aux_loss_scale == 0:
            return weights
        if self.tp_cp_group.size() > 1:
            # Backward of this micro-batch needs those of whole rows.
            dist.all_reduce(loads, group=self.tp_cp_group)
        balance = balance_loss(loads, summed)
        scaled: torch.Tensor = MoEAuxLossAutoScaler.apply(weights, self._aux_loss_scale * balance)
        return scaled

    def _own_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """Return this rank's tokens of a tensor over all tokens of the pack; sequence parallelism splits them."""
        if not self.config.sequence_parallel:
            return values
        return values.chunk(self.tp_group.size())[self.tp_group.rank()]


class RoutedExperts(MoELayer):
    """Megatron's mixture-of-experts layer, which backward, if `recomputed`, computes again for the same pack."""

    recomputed: bool

    def forward(self, hidden_states: torch.Tensor, *arguments: object, **named: object) -> object:
        if not (self.recomputed and self.training and torch.is_grad_enabled()):
            return super().forward(hidden_states, *arguments, **named)
        pack, compute = self.router.pack, super().forward

        def compute_for_pack(hidden: torch.Tensor) -> object:
            self.router.pack = pack
            return compute(hidden, *arguments, **named)

        if self.config.fp8:
            from megatron.core.extensions.transformer_engine import te_checkpoint

            return te_checkpoint(compute_for_pack, False, get_cuda_rng_tracker, self.tp_group, hidden_states)
        return checkpoint(compute_for_pack, False, hidden_states)


class RoutedLayer(TransformerLayer):
    """A decoder layer with experts that passes the current pack to its router before each forward."""

    def __init__(self, *arguments: object, **named: object) -> None:
        super().__init__(*arguments, **named)
        # Not in the spec: Megatron gives its groups only to layers of classes that it knows.
        self.mlp.__class__ = RoutedExperts
        self.mlp.recomputed, self.mlp.moe_layer_recompute = self.mlp.moe_layer_recompute, False

    def forward(self, *arguments: object, packed_seq_params: PackedSeqParams | None = None, **named: object) -> object:
        assert isinstance(packed_seq_params, PackSeqParams)
        self.mlp.router.pack = packed_seq_params.pack
        try:
            return super().forward(*arguments, packed_seq_params=packed_seq_params, **named)
        finally:
            self.mlp.router.pack = None


def with_pack_routers(layers: Iterable[ModuleSpec]) -> None:
    """Set `RoutedLayer` and `PackRouter` in the specs of those layers that have experts, in place."""
    for layer in layers:
        mlp = module_spec(layer.submodules.mlp)
        if mlp.module is MoELayer:
            layer.module = RoutedLayer
            mlp.submodules.router = PackRouter


def moe_layers(chunks: Iterable[torch.nn.Module]) -> Iterator[MoELayer]:
    """Yield the mixture-of-experts layers in a rank's model chunks."""
    for chunk in chunks:
        yield from (module for module in chunk.modules() if isinstance(module, MoELayer))


class MiniBatchLoad:
    """The number of tokens that each expert gets in one optimizer mini-batch, summed over all ranks.

    Creating the object resets the routers' sums, and `metrics` reads them. For a dense model, neither does anything.
    """

    def __init__(
        self,
        chunks: Iterable[torch.nn.Module],
        experts: Experts | None,
        rows: Rows,
        micro_batches: Sequence[Sequence[int]],
        *,
        aux_loss_coef: float,
        dp_group: dist.ProcessGroup,
    ) -> None:
        self._experts = experts
        if experts is None:
            return
        self._layers, scale = list(moe_layers(chunks)), 0.0
        if aux_loss_coef > 0:
            own = (rows[i] for batch in micro_batches for i in batch)
            count = torch.tensor(sum(row.num_tokens - row.num_uncounted for row in own))
            count = count.to(platform().device())
            if dp_group.size() > 1:
                dist.all_reduce(count, group=dp_group)
            scale = aux_loss_coef / max(int(count), 1)
        for layer in self._layers:
            layer.router.begin(aux_loss_scale=scale)

    def metrics(self) -> Mapping[str, float]:
        """Sum over all ranks, free the routers' sums, and return metrics of load and balance; {} without experts."""
        if self._experts is None:
            return {}
        place = {layer: i for i, layer in enumerate(self._experts.layers)}
        # There is a column per expert, and one for the balance loss. Each stage adds its layers, each replica its rows.
        totals = torch.zeros(len(place), self._experts.num + 1, dtype=torch.float64, device=platform().device())
        if layers := [layer for layer in self._layers if layer.router.sums]:
            # [layers, 2, rows, E].
            sums = torch.stack([torch.cat(layer.router.sums, dim=1) for layer in layers])
            group = layers[0].router.tp_cp_group
            if group.size() > 1:
                dist.all_reduce(sums, group=group)
            # All ranks of the group have the same now, of which one counts.
            if group.rank() == 0:
                loads, probabilities = sums.double().unbind(1)
                found = torch.cat([loads.sum(1), balance_loss(loads, probabilities)[:, None]], dim=1)
                totals[[place[layer.layer_number - 1] for layer in layers]] = found
        for layer in self._layers:
            layer.router.begin(aux_loss_scale=0.0)
        dist.all_reduce(totals)
        loads, balance = totals[:, :-1].cpu(), totals[:, -1].cpu()
        return load_metrics(loads, balance, max(loads[0].sum().item() / self._experts.per_token, 1.0))
