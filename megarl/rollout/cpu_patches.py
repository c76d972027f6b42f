"""Patch what vLLM 0.32 computes wrongly on CPUs, or refuses there; nothing is patched on other devices.

Workers import this module before they build their model; `tests/unit/rollout/test_cpu_patches.py` has what vLLM does
without each patch.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from vllm.distributed.parallel_state import get_pp_group
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.router import cpu_router
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.platforms import current_platform
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.worker.cpu_model_runner import CPUModelRunner


def repack_cpu_weights(model: torch.nn.Module) -> None:
    """Renew the packed copies that CPU kernels read but a reload leaves stale; no-op elsewhere."""
    for layer in model.modules():
        if isinstance(layer, VocabParallelEmbedding) and hasattr(layer, "cpu_linear"):
            # For a tied output head: its oneDNN handle holds a packed copy of the embedding.
            dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
        elif isinstance(layer, RoutedExperts):
            experts = layer.quant_method.moe_kernel.fused_experts
            if type(experts).__module__.endswith("cpu_moe"):
                experts.process_weights_after_loading(layer)


def expand_to_tokens(
    values: torch.Tensor, ends: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Repeat each request's value [B] for its drafted tokens (to `ends` [B]), `replace_from` as `replace_to`."""
    counts = torch.diff(ends.long(), prepend=ends.new_zeros(1).long())
    replaced = values.masked_fill(values == replace_from, replace_to)
    return replaced.repeat_interleave(counts, output_size=num_tokens)


def truncate_drafted(logits: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None) -> torch.Tensor:
    """Mask the logits [T, V] of drafted tokens by top-k and top-p; T may be 0, which vLLM's function cannot take."""
    return apply_top_k_top_p(logits, top_k, top_p) if len(logits) else logits


def make_inputs(runner: CPUModelRunner) -> None:
    """Allocate what a pipeline stage receives from the one before; vLLM does it in a trial run, which needs graphs."""
    if not get_pp_group().is_first_rank:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.dtype, device=runner.device
        )


def delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the gated delta rule (arXiv:2412.06464) over the tokens of one request, in float32, one after the other.

    S ← exp(g)·S, then S ← S + β·(v − S·k)·kᵀ; the output is S·q. query, key: [T, heads, keys], normalised here, the
    query also scaled by 1/√keys; value: [T, heads of values, values]; log_decay (g), beta: [T, heads of values]; state
    (S): [heads of values, values, keys]. Returns outputs [T, heads of values, values] and the last state.
    """
    query, key, value, state = (x.float() for x in (query, key, value, state))
    query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    repeats = value.shape[1] // key.shape[1]
    query, key = (x.repeat_interleave(repeats, 1) for x in (query * query.shape[-1] ** -0.5, key))
    outputs = []
    for q, k, v, g, b in zip(query, key, value, log_decay.float(), beta.float(), strict=True):
        state = state * g.exp()[:, None, None]
        error = (v - torch.einsum("hvk,hk->hv", state, k)) * b[:, None]
        state = state + error[:, :, None] * k[:, None, :]
        outputs.append(torch.einsum("hvk,hk->hv", state, q))
    return torch.stack(outputs), state


_bfloat16_delta_net = gdn_attention.cpu_gdn_attention_core


def delta_net(
    mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core_attn_out: torch.Tensor, layer_name: LayerNameType
) -> None:
    """Compute the core of a gated delta net: convolution, SiLU and delta rule from each request's cached state.

    vLLM's own kernels take bfloat16 only; they still compute it.
    """
    context = get_forward_context()
    if mixed_qkv.dtype == torch.bfloat16:
        _bfloat16_delta_net(mixed_qkv, b, a, core_attn_out, layer_name)
    elif context.attn_metadata is not None:
        layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
        _float32_delta_net(layer, context.attn_metadata[layer.prefix], mixed_qkv, b, a, core_attn_out)


def _float32_delta_net(
    layer: Any, batch: Any, mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, out: torch.Tensor
) -> None:
    """Compute the core of a layer for the requests of a batch, of which those that decode come first."""
    histories, states = layer.kv_cache[0], layer.kv_cache[1]
    if not is_conv_state_dim_first():
        histories = histories.transpose(-1, -2)
    kernel, width = layer.conv1d.weight.flatten(1)[:, None], layer.conv1d.weight.shape[-1]
    if histories.shape[-1] != width - 1:
        raise NotImplementedError(
            "rollout.engine.speculation: gated delta nets in float32 cannot check drafted tokens on CPUs; set its "
            "method to none"
        )
    log_decay, beta = -layer.A_log.float().exp() * F.softplus(a.float() + layer.dt_bias.float()), b.float().sigmoid()
    ends, slots = batch.non_spec_query_start_loc.tolist(), batch.non_spec_state_indices_tensor.tolist()
    for i in range(batch.num_decodes + batch.num_prefills):
        tokens, slot = slice(ends[i], ends[i + 1]), slots[i]
        if i >= batch.num_decodes and not batch.has_initial_state[i]:
            histories[slot].zero_()
            states[slot].zero_()
        inputs = torch.cat([histories[slot], mixed_qkv[tokens].t()], 1)
        histories[slot].copy_(inputs[:, 1 - width :])
        mixed = F.silu(F.conv1d(inputs[None], kernel, layer.conv1d.bias, groups=len(inputs))[0].t())
        query, key, value = (x.squeeze(0) for x in layer.rearrange_mixed_qkv(mixed))
        outputs, state = delta_rule(query, key, value, log_decay[tokens], beta[tokens], states[slot])
        out[tokens] = outputs.to(out.dtype)
        states[slot].copy_(state)


_rotate_flat = RotaryEmbedding.forward_cpu


def rotate(
    self: RotaryEmbedding, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rotate queries and keys by their positions. vLLM's kernel takes heads side by side, [T, heads · size].

    Latent attention gives it [T, heads, size], of which it would rotate the first head only.
    """
    forward = self.forward_native if query.dim() > 2 else functools.partial(_rotate_flat, self)
    rotated: tuple[torch.Tensor, torch.Tensor | None] = forward(positions, query, key)
    return rotated


_route = cpu_router.CPURouter._compute_routing


def route(
    self: cpu_router.CPURouter,
    hidden_states: torch.Tensor,
    router_logits: torch.Tensor,
    indices_type: torch.dtype | None,
    *,
    input_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights and numbers of each token's experts.

    vLLM's CPU router takes sigmoid scores only where experts come in groups, so that here all are one group.
    """
    routed: tuple[torch.Tensor, torch.Tensor]
    if self.scoring_func != "sigmoid" or self.use_grouped_topk or self.custom_routing_function is not None:
        routed = _route(self, hidden_states, router_logits, indices_type, input_ids=input_ids)
    else:
        routed = cpu_router._grouped_topk(
            gating_output=router_logits,
            topk=self.top_k,
            renormalize=self.renormalize,
            num_expert_group=1,
            topk_group=1,
            scoring_func=self.scoring_func,
            routed_scaling_factor=self.routed_scaling_factor,
            e_score_correction_bias=self.e_score_correction_bias,
        )
    return routed


_load_model = CPUModelRunner.load_model


def _load_and_make_inputs(runner: CPUModelRunner, *args: object, **kwargs: object) -> None:
    _load_model(runner, *args, **kwargs)
    make_inputs(runner)


if current_platform.is_cpu():
    # The CPU kernel writes into a copy, so that temperatures of drafted tokens are what memory held.
    rejection_sampler.expand_batch_to_tokens = expand_to_tokens
    rejection_sampler.apply_top_k_top_p = truncate_drafted
    # Without graphs there is no trial run on CPUs.
    CPUModelRunner.load_model = _load_and_make_inputs
    gdn_attention.cpu_gdn_attention_core = delta_net
    RotaryEmbedding.forward_cpu = rotate
    cpu_router.CPURouter._compute_routing = route
