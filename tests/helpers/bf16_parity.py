"""How far a model in bfloat16 is from transformers in float32, and how far transformers itself is in bfloat16."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from megarl.config.schema import LayoutConfig, MoeConfig
from megarl.types import Row
from tests.helpers.family_parity import Reference, make_rows, run_ranks, run_transformers
from tests.helpers.rank_pool import RankPool

# Sizes for kernels of GPUs, by a family's beginning: heads are multiples of 32, experts of 64.
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
_EXPERTS = {**SIZES, "moe_intermediate_size": 64}
_DELTA = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": SIZES,
    "qwen3_5": {**SIZES, **_DELTA},
    # All experts, as below.
    "qwen3_next": {**_EXPERTS, **_DELTA, "shared_expert_intermediate_size": 64, "num_experts_per_tok": 6},
    "gemma": SIZES,
    "qwen3_moe": _EXPERTS,
    # All experts, because rounding changes which are best; windows are shorter than most rows.
    "gpt_oss": {**SIZES, "intermediate_size": 64, "num_experts_per_tok": 6},
    "deepseek_v3": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 64,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        # All experts, because rounding changes which are best; it is attention through latents that matters here.
        "num_experts_per_tok": 6,
        "n_group": 1,
        "topk_group": 1,
    },
}
# Roundings of two implementations in bfloat16 are of one size; a wrong formula is off by far more.
TIMES_TRANSFORMERS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """Mean |Δ log p| over loss tokens in nats, and ‖Δ gradient‖ / ‖gradient‖ over all weights."""

    logprobs: float
    gradients: float


def distance(
    rows: Sequence[Row], logprobs: list[np.ndarray], gradients: dict[str, torch.Tensor], exact: Reference
) -> Distance:
    masks = [row.loss_mask for row in rows]
    apart = [np.abs(a - b)[mask] for a, b, mask in zip(logprobs, exact.logprobs, masks, strict=True)]
    # Buffers, such as biases of routers, are among the tensors of files, but have no gradients.
    names = [name for name in exact.gradients if not name.endswith("e_score_correction_bias")]
    square = sum(float((gradients[name].float() - exact.gradients[name]).square().sum()) for name in names)
    whole = sum(float(exact.gradients[name].square().sum()) for name in names)
    return Distance(logprobs=float(np.concatenate(apart).mean()), gradients=(square / whole) ** 0.5)


def assert_as_close_as_transformers(
    pool: RankPool,
    path: Path,
    target: Path,
    moe: MoeConfig | None = None,
    *,
    rows: Sequence[Row] = (),
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """A model of bfloat16 weights on one rank, in packs of several rows; settings: further ones of the actor."""
    rows = rows or make_rows()
    exact, rounded = run_transformers(path, rows=rows), run_transformers(path, rows=rows, dtype=torch.bfloat16)
    theirs = distance(rows, rounded.logprobs, rounded.gradients, exact)
    (got,) = run_ranks(pool, path, LayoutConfig(), target, rows, moe or MoeConfig(), "none", "bfloat16", settings)
    logprobs = [got.logprobs[i] for i in range(len(exact.logprobs))]
    ours = distance(rows, logprobs, load_file(target / "gradients/model.safetensors"), exact)
    print(f"ours {ours}; transformers' {theirs}")
    assert 0 < ours.logprobs <= TIMES_TRANSFORMERS * theirs.logprobs, (ours, theirs)
    assert 0 < ours.gradients <= TIMES_TRANSFORMERS * theirs.gradients, (ours, theirs)
