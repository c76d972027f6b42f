"""A small random model in transformers and in a layout of ranks: logits, log-probs, gradients, and files as read."""

import functools
import json
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from megarl.config.schema import ActorConfig, LayoutConfig, ModelConfig, MoeConfig, OptimizerConfig
from megarl.train.export import check_complete
from megarl.types import FloatArray, Row
from megarl.types.messages import StoreResult, Vision
from megarl.weights.families import read_model_spec
from megarl.weights.safetensors_map import create_model_files, weight_specs
from tests.helpers.hf_models import VOCAB_SIZE, assert_same_tensors
from tests.helpers.measure import MeasureCase, Measured, measure
from tests.helpers.rank_pool import RankPool
from tests.helpers.routers import Routers

# (prompt, response) tokens; one-token prompts and responses, equal neighbours, odd sums.
LENGTHS = [(9, 6), (1, 1), (1, 50), (4, 1), (3, 2), (17, 8), (2, 3), (30, 30)]
TOLERANCE = 1e-5
# Of a gradient's largest element. Gradients of key biases nearly cancel, in transformers as well.
GRADIENT_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A checkpoint and what transformers makes of the rows.

    gradients: of the mean negative log-likelihood, by the tensors of files; buffers among these are as they are.
    """

    path: Path
    logits: list[FloatArray]
    logprobs: list[FloatArray]
    gradients: dict[str, torch.Tensor]
    grad_norm: float


def make_rows() -> list[Row]:
    rng = np.random.default_rng(0)
    return [
        Row(
            uid=f"p{i}",
            sample_index=0,
            token_ids=rng.integers(0, VOCAB_SIZE, num_prompt + num_response),
            num_prompt_tokens=num_prompt,
            loss_mask=np.arange(num_response) % 3 != 2,
        )
        for i, (num_prompt, num_response) in enumerate(LENGTHS)
    ]


def load_transformers(path: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model as transformers reads it, with its plain attention."""
    is_whole = "vision_config" in json.loads((path / "config.json").read_text())
    # The class of a whole model also where there is one of its language model alone.
    auto = AutoModelForImageTextToText if is_whole else AutoModelForCausalLM
    hf: PreTrainedModel = auto.from_pretrained(path, dtype=dtype, attn_implementation="eager")
    module = sys.modules[type(hf).__module__]
    if hasattr(module, "torch_chunk_gated_delta_rule"):
        # In chunks, it sums up decays in float32, and errs by more than the tolerance. Token by token it does not.
        module.torch_chunk_gated_delta_rule = module.torch_recurrent_gated_delta_rule
    return hf.eval()


@torch.no_grad()
def dense_logits(path: Path) -> list[FloatArray]:
    """[row tokens, V] of transformers, row by row."""
    hf = load_transformers(path)
    return [hf(torch.from_numpy(row.token_ids)[None]).logits[0].numpy() for row in make_rows()]


def run_transformers(
    path: Path,
    routers: Routers | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    rows: Sequence[Row] | None = None,
) -> Reference:
    """Row by row, without packing or padding, reading the same config.json; with experts, `routers` watches these.

    rows: others than those of `make_rows`.
    """
    rows, hf = rows or make_rows(), load_transformers(path, dtype)
    if routers is not None:
        routers.attach(hf)
    num_tokens = sum(row.num_loss_tokens for row in rows)
    logits, logprobs = [], []
    for i, row in enumerate(rows):
        tokens = torch.from_numpy(row.token_ids)
        if routers is not None:
            routers.begin(i)
        out = hf(tokens[None]).logits[0].float()
        log_p = out.log_softmax(-1)[row.num_prompt_tokens - 1 : -1]
        masked = log_p.gather(1, tokens[row.num_prompt_tokens :, None])[:, 0] * torch.from_numpy(row.loss_mask)
        loss = -masked.sum() / num_tokens
        if routers is not None:
            loss = loss + routers.balance_share(sum(each.num_tokens - each.num_uncounted for each in rows))
        loss.backward()
        logits.append(out.detach().numpy())
        logprobs.append(masked.detach().numpy())
    grads = [parameter.grad.float() for parameter in hf.parameters() if parameter.grad is not None]
    norm = math.sqrt(sum(grad.square().sum().item() for grad in grads))
    return Reference(path=path, logits=logits, logprobs=logprobs, gradients=_gradients(hf), grad_norm=norm)


def _gradients(hf: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Under the names that files have: transformers writes experts apart that it holds in one tensor."""
    with tempfile.TemporaryDirectory() as directory, torch.no_grad():
        for parameter in hf.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        hf.save_pretrained(directory)
        return load_file(Path(directory) / "model.safetensors")


def split_rows(num_rows: int, dp: int) -> list[list[list[int]]]:
    """Two micro-batches for each data-parallel rank, of rows that lie apart."""
    return [[list(range(2 * r + half, num_rows, 2 * dp)) for half in range(2)] for r in range(dp)]


def run_ranks(
    pool: RankPool,
    path: Path,
    layout: LayoutConfig,
    target: Path,
    rows: Sequence[Row],
    moe: MoeConfig,
    recompute: Literal["none", "selective", "full"],
    dtype: Literal["float32", "bfloat16"] = "float32",
    settings: Mapping[str, Any] = MappingProxyType({}),
    vision: Vision | None = None,
    overlaps: bool = False,
) -> list[Measured]:
    spec = read_model_spec(path)
    specs = weight_specs(spec.with_tower(vision and vision.train), dtype)
    weights, gradients = (create_model_files(target / name, specs) for name in ("weights", "gradients"))
    case = MeasureCase(
        model=ModelConfig(path=str(path), dtype=dtype, vocab_multiple=4),
        actor=ActorConfig(
            layout=layout,
            optimizer=OptimizerConfig(distributed=False, clip_grad_norm=1e9, overlap_grad_reduce=overlaps),
            moe=moe,
            recompute=recompute,
            **settings,
        ),
        rows=rows,
        micro_batches=split_rows(len(rows), layout.dp),
        weight_files=[str(file) for file in weights],
        gradient_files=[str(file) for file in gradients],
        vision=vision,
    )
    measured: list[Measured] = pool.run(measure, case)
    num_elements = {name: math.prod(spec.shape) for name, spec in specs.items()}
    for results in ([m.weights for m in measured], [m.gradients for m in measured]):
        check_complete(num_elements, functools.reduce(StoreResult.merged, results).num_elements)
    return measured


def assert_rows(what: str, measured: list[Mapping[int, FloatArray]], expected: list[FloatArray]) -> None:
    """Ranks of different replicas report different rows, of the same replica the same."""
    merged = {i: values for part in measured for i, values in part.items()}
    assert sorted(merged) == list(range(len(expected)))
    error = max(float(np.abs(merged[i] - values).max()) for i, values in enumerate(expected))
    assert error <= TOLERANCE, f"{what}: max |Δ| is {error:.2e}"


def assert_gradients(written: Path, expected: dict[str, torch.Tensor]) -> None:
    got = load_file(written)
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        error, largest = float((got[name] - gradient).abs().max()), float(gradient.abs().max())
        assert error <= GRADIENT_TOLERANCE * largest, f"{name}: max |Δ| is {error:.2e} of {largest:.2e}"


def assert_equals_transformers(
    pool: RankPool,
    expected: Reference,
    layout: LayoutConfig,
    target: Path,
    *,
    rows: Sequence[Row] | None = None,
    moe: MoeConfig | None = None,
    recompute: Literal["none", "selective", "full"] = "none",
) -> list[Measured]:
    """Logits, log-probs and gradients are transformers', and weights are written as they were read.

    rows: those of the reference, if they are not what `make_rows` makes.
    """
    # Far from uniform, so that equality means something.
    assert np.concatenate(expected.logits).std() > 0.5
    measured = run_ranks(pool, expected.path, layout, target, rows or make_rows(), moe or MoeConfig(), recompute)
    assert_rows("logits", [m.logits for m in measured], expected.logits)
    assert_rows("log-probs", [m.logprobs for m in measured], expected.logprobs)
    assert_same_tensors(target / "weights", expected.path)
    assert_gradients(target / "gradients/model.safetensors", expected.gradients)
    norms = [m.grad_norm for m in measured if m.grad_norm]
    assert norms == pytest.approx([expected.grad_norm] * layout.dp, rel=1e-5)
    return measured
