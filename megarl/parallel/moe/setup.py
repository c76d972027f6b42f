"""Models with experts set up: Megatron's options, whose gradients are reduced where, frozen routers."""

from collections.abc import Sequence
from typing import Any

import torch

from megarl.config.schema import LayoutConfig, MoeConfig
from megarl.parallel.moe.router import moe_layers
from megarl.weights.dims import Dims, Routing


def expert_options(dims: Dims, layout: LayoutConfig) -> dict[str, Any]:
    """Fields of Megatron's configuration; none for a model without experts."""
    experts = dims.experts
    if experts is None:
        return {}
    with_experts = [int(layer in experts.layers) for layer in range(dims.num_layers)]
    return {
        "num_moe_experts": experts.num,
        "moe_router_topk": experts.per_token,
        "moe_ffn_hidden_size": experts.ffn,
        # In checkpoints Megatron stacks layers unless a list says which have experts.
        "moe_layer_freq": 1 if dims.has_equal_layers else with_experts,
        # Softmax over all experts; otherwise over the chosen ones, which is the same as normalising their share.
        "moe_router_pre_softmax": not experts.normalized,
        "moe_router_dtype": "fp32",
        # The balance loss is ours: Megatron's depends on micro-batches, and divides by tokens at the end.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "moe_shared_expert_intermediate_size": experts.shared_ffn or None,
        **_routing_options(experts.routing),
    }


def _routing_options(routing: Routing | None) -> dict[str, Any]:
    if routing is None:
        return {}
    grouped, biased = routing.num_groups > 1, routing.biased
    return {
        "moe_router_score_function": "sigmoid" if biased else "softmax",
        "moe_router_enable_expert_bias": biased,
        # Pre-training moves the bias towards balance; here it stays as it was read.
        "moe_router_bias_update_rate": 0.0,
        "moe_router_topk_scaling_factor": routing.scale,
        "moe_router_num_groups": routing.num_groups if grouped else None,
        "moe_router_group_topk": routing.groups_per_token if grouped else None,
    }


def rate_groups(model: torch.nn.Module, dims: Dims) -> None:
    """Tell routers by how many of its best experts a group of experts is rated; Megatron has no option for it."""
    if dims.experts is None or dims.experts.routing is None:
        return
    for layer in moe_layers([model]):
        layer.router.group_rating = dims.experts.routing.group_rating


def prepare_experts(chunks: Sequence[torch.nn.Module], config: MoeConfig) -> None:
    """Before Megatron wraps the chunks for training: say which parameters are experts', freeze routers if asked."""
    for layer in moe_layers(chunks):
        for parameter in layer.experts.parameters():
            # Megatron takes them for replicated over data-parallel ranks unless experts are split. But without
            # expert parallelism too, their replicas are those of `expert_dp`, which may be more ranks.
            parameter.allreduce = False
        layer.router.requires_grad_(not config.freeze_router)
