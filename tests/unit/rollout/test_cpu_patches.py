"""What replaces vLLM's functions for current models on CPUs, and what vLLM does without it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

# vLLM is imported in the tests alone: every process of a parallel session collects this file.


def test_every_head_is_rotated() -> None:
    """Pairs of neighbours turn by position · θ^(-2i/d), as complex numbers; queries and keys are parts of tensors."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    from megarl.rollout import cpu_patches

    with set_current_vllm_config(VllmConfig()):
        rope = RotaryEmbedding(8, 8, 32, 100.0, is_neox_style=False, dtype=torch.float32)
    torch.manual_seed(0)
    positions, query, latent = torch.tensor([3, 0, 17]), torch.randn(3, 4, 20), torch.randn(3, 30)
    turns = torch.polar(torch.ones(3, 4), positions[:, None] * 100.0 ** (-torch.arange(4) / 4))

    def views() -> tuple[torch.Tensor, torch.Tensor]:
        return query.clone()[..., 12:], latent.clone()[:, 22:].unsqueeze(1)

    expected = [
        torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (4, 2)).contiguous()) * turns[:, None]).flatten(-2)
        for x in views()
    ]
    for got, wanted in zip(rope.forward_cpu(positions, *views()), expected, strict=True):
        assert (got - wanted).abs().max() <= 1e-6
    query_alone, _ = cpu_patches._rotate_flat(rope, positions, *views())
    assert (query_alone - expected[0]).abs().max() > 0.1, "vLLM no longer needs the patch"


def router(**settings: Any) -> Any:
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    return CPURouter(2, 4, scoring_func="sigmoid", **settings)


def test_biases_choose_experts_by_their_sigmoid_scores() -> None:
    """Scores are 0.9, 0.8, 0.5 and 0.2; with their biases 0.9, 0.8, 0.95 and 1.2."""
    from megarl.rollout import cpu_patches

    scores, bias = torch.tensor([[0.9, 0.8, 0.5, 0.2]]), torch.tensor([0.0, 0.0, 0.45, 1.0])
    hidden, logits = torch.zeros(1, 1), scores.logit()
    weights, experts = router(e_score_correction_bias=bias)._compute_routing(hidden, logits, None)
    found = dict(zip(experts[0].tolist(), weights[0].tolist(), strict=True))
    assert found == pytest.approx({2: 0.5 / 0.7, 3: 0.2 / 0.7})
    weights, experts = router(renormalize=False)._compute_routing(hidden, logits, None)
    assert dict(zip(experts[0].tolist(), weights[0].tolist(), strict=True)) == pytest.approx({0: 0.9, 1: 0.8})
    # vLLM no longer needs the patch if this passes.
    with pytest.raises(AssertionError):
        cpu_patches._route(router(), hidden, logits, None)


def test_delta_rule_is_that_of_transformers() -> None:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    from megarl.rollout.cpu_patches import delta_rule

    torch.manual_seed(0)
    query, key, value = torch.randn(9, 2, 8), torch.randn(9, 2, 8), torch.randn(9, 4, 6)
    decay, beta, state = -torch.rand(9, 4), torch.rand(9, 4), torch.randn(4, 6, 8)
    got, last = delta_rule(query, key, value, decay, beta, state)
    repeated = (x.repeat_interleave(2, 1)[None] for x in (query, key))
    expected, expected_last = torch_recurrent_gated_delta_rule(
        *repeated,
        value[None],
        g=decay[None],
        beta=beta[None],
        initial_state=state.transpose(1, 2)[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    assert (got - expected[0]).abs().max() <= 1e-6
    assert (last.transpose(1, 2) - expected_last[0]).abs().max() <= 1e-6


def delta_layer() -> tuple[Any, list[torch.Tensor]]:
    """A layer of one key head and two heads of values, with a cache of three requests, full of old numbers."""

    def split(mixed: torch.Tensor) -> list[torch.Tensor]:
        heads = zip(mixed.split([4, 4, 12], dim=-1), (1, 1, 2), strict=True)
        return [x.unflatten(-1, (num, -1))[None] for x, num in heads]

    cache = [torch.full((3, 3, 20), 7.0), torch.full((3, 2, 6, 4), 7.0)]
    layer = SimpleNamespace(
        kv_cache=cache,
        conv1d=SimpleNamespace(weight=torch.randn(20, 1, 4), bias=None),
        A_log=torch.rand(2),
        dt_bias=torch.rand(2),
        rearrange_mixed_qkv=split,
    )
    return layer, [torch.randn(12, 20), torch.randn(12, 2), torch.randn(12, 2)]


def test_requests_go_on_from_their_own_states() -> None:
    """Rows of 7 and 5 tokens at once; and 6 and 4 first, then the last tokens of both."""
    from megarl.rollout.cpu_patches import _float32_delta_net

    torch.manual_seed(0)
    layer, inputs = delta_layer()

    def run(rows: torch.Tensor, ends: list[int], *, num_decodes: int) -> torch.Tensor:
        batch = SimpleNamespace(
            num_decodes=num_decodes,
            num_prefills=2 - num_decodes,
            has_initial_state=torch.tensor([False, False]),
            non_spec_query_start_loc=torch.tensor(ends),
            non_spec_state_indices_tensor=torch.tensor([2, 1]),
        )
        out = torch.zeros(len(rows), 2, 6)
        _float32_delta_net(layer, batch, *(x[rows] for x in inputs), out)
        return out

    whole = run(torch.arange(12), [0, 7, 12], num_decodes=0)
    assert whole.std() > 0.01
    first = torch.tensor([*range(6), *range(7, 11)])
    assert torch.allclose(run(first, [0, 6, 10], num_decodes=0), whole[first], atol=1e-6)
    assert torch.allclose(run(torch.tensor([6, 11]), [0, 1, 2], num_decodes=2), whole[[6, 11]], atol=1e-6)
    # With room for drafted tokens.
    layer.kv_cache[0] = torch.zeros(3, 5, 20)
    with pytest.raises(NotImplementedError, match=r"rollout\.engine\.speculation: .* set its method to none"):
        run(torch.arange(12), [0, 7, 12], num_decodes=0)


def test_vllm_calls_them() -> None:
    import inspect

    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    from megarl.rollout import cpu_patches, worker_extension

    assert worker_extension.repack_cpu_weights is cpu_patches.repack_cpu_weights
    assert RotaryEmbedding.forward_cpu is cpu_patches.rotate
    assert CPURouter._compute_routing is cpu_patches.route
    # It is registered when the first such layer is built, which is after this import.
    assert gdn_attention.cpu_gdn_attention_core is cpu_patches.delta_net
    assert "op_func=cpu_gdn_attention_core" in inspect.getsource(gdn_attention.register_cpu_gdn_attention_ops)
