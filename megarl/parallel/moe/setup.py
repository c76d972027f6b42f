"""Set up mixture-of-experts models: Megatron's options, process groups that reduce gradients, and frozen routers."""

from collections.abc import Sequence

import torch
from megatron.core.tensor_parallel import RowParallelLinear

from megarl.config.models import fused_kernels, transformer_engine_version
from megarl.config.schema import LayoutConfig, MoeConfig
from megarl.parallel.moe.router import moe_layers
from megarl.weights.dims import Dims


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
