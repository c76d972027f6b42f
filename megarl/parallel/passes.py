"""Forward-only and forward-backward passes of a model over micro-batches, on Megatron's schedules."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

from megarl.errors import NonFiniteError
from megarl.parallel.logprobs import TokenLogprobs
from megarl.parallel.messages import RowScores, UpdateResult
from megarl.parallel.model import HeadRequest, PolicyModel
from megarl.parallel.packing import Pack, pack_rows
from megarl.parallel.platform import platform
from megarl.types import (
    Algorithm,
    AlgoState,
    Denominators,
    FloatArray,
    LossSums,
    PolicyOutputs,
    RowBatch,
    Rows,
    row_batch,
)

MicroBatches: TypeAlias = Sequence[Sequence[int]]


def _run_schedule(
    model: torch.nn.Module,
    rows: Rows,
    micro_batches: MicroBatches,
    request: HeadRequest,
    on_output: Callable[[Pack, Sequence[int], TokenLogprobs], Any],
    *,
    forward_only: bool,
) -> list[Any]:
    """Feed packs to the model in Megatron's schedule; `on_output` ends each micro-batch's forward."""
    policy = model if isinstance(model, PolicyModel) else model.module
    assert isinstance(policy, PolicyModel)
    multiple = policy.config.tensor_model_parallel_size if policy.config.sequence_parallel else 1
    device = platform().device()

    def forward_step(batches: Iterator[Sequence[int]], stage: torch.nn.Module) -> tuple[Any, Callable[..., Any]]:
        indices = next(batches)
        pack = pack_rows([rows[i] for i in indices], multiple=multiple, device=device)
        return stage(pack, request), lambda out, **_: on_output(pack, indices, out)

    results: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(micro_batches),
        model=model,
        num_microbatches=len(micro_batches),
        seq_length=1,
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
    return results


def _to_rows(values: torch.Tensor, rows: Rows, indices: Sequence[int]) -> dict[int, FloatArray]:
    host = values.detach().float().cpu().numpy()
    return {i: host[b, : rows[i].num_response_tokens] for b, i in enumerate(indices)}


def _require_finite(logprobs: torch.Tensor, rows: Rows, indices: Sequence[int], step: int) -> None:
    """Raise with the step and the first row whose log-probs are NaN or infinite."""
    bad = ~torch.isfinite(logprobs).all(1)
    if bad.any():
        row = rows[indices[int(bad.nonzero()[0])]]
        raise NonFiniteError(
            f"step {step}: log-probs of row {row.label} are not finite; the weights or inputs have diverged: "
            f"lower actor.optimizer.lr, or start from an earlier checkpoint"
        )


@torch.no_grad()
def score_rows(
    model: torch.nn.Module,
    rows: Rows,
    micro_batches: MicroBatches,
    request: HeadRequest,
    *,
    step: int,
) -> RowScores:
    """Log-probs and entropies of the rows named by `micro_batches`, without a graph."""
    logprobs: dict[int, FloatArray] = {}
    entropy: dict[int, FloatArray] = {}

    def collect(pack: Pack, indices: Sequence[int], out: TokenLogprobs) -> None:
        padded = pack.scatter(out.logprobs)
        _require_finite(padded, rows, indices, step)
        logprobs.update(_to_rows(padded, rows, indices))
        entropy.update(_to_rows(pack.scatter(out.entropy), rows, indices))

    _run_schedule(model, rows, micro_batches, request, collect, forward_only=True)
    return RowScores(logprobs=logprobs, entropy=entropy)


def accumulate_gradients(
    ddp: torch.nn.Module,
    rows: Rows,
    micro_batches: MicroBatches,
    request: HeadRequest,
    *,
    algorithm: Algorithm,
    state: AlgoState,
    denominators: Denominators,
    dp_group: dist.ProcessGroup,
    step: int,
) -> UpdateResult:
    """Forward and backward of one optimizer mini-batch; gradients end up reduced in Megatron's buffers."""
    device = platform().device()
    logprobs: dict[int, FloatArray] = {}
    sums: dict[str, float] = {"actor/loss": 0.0}

    def loss_of(
        pack: Pack, indices: Sequence[int], out: TokenLogprobs
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        outputs = PolicyOutputs(logprobs=pack.scatter(out.logprobs), entropy=pack.scatter(out.entropy))
        _require_finite(outputs.logprobs, rows, indices, step)
        logprobs.update(_to_rows(outputs.logprobs, rows, indices))
        batch = row_batch([rows[i] for i in indices], device=device)
        parts = algorithm.loss(batch, outputs, state)
        loss = parts.loss / denominators.loss
        if not torch.isfinite(loss):
            raise NonFiniteError(f"step {step}: loss is {loss.item()}; {_explain(batch)}")
        _add_sums(sums, parts, denominators)
        # Megatron wants (loss, tokens, logs); the loss is final, so the token count is not used.
        return loss, torch.ones((), dtype=torch.int, device=device), {}

    _run_schedule(ddp, rows, micro_batches, request, loss_of, forward_only=False)
    return UpdateResult(metrics=_reduce_sums(sums, dp_group, device), logprobs=logprobs)


def _explain(batch: RowBatch) -> str:
    """Which score of which row spoils a loss."""
    for name, values in batch.scores.items():
        bad = ~torch.isfinite(values).all(1)
        if bad.any():
            return f"{name} of row {batch.labels[int(bad.nonzero()[0])]} are not finite"
    return f"all scores are finite; its micro-batch starts with row {batch.labels[0]}: lower actor.optimizer.lr"


def _add_sums(sums: dict[str, float], parts: LossSums, denominators: Denominators) -> None:
    sums["actor/loss"] += float(parts.loss.detach()) / denominators.loss
    for name, value in parts.loss_parts.items():
        sums[name] = sums.get(name, 0.0) + float(value) / denominators.loss
    for name, value in parts.token_sums.items():
        sums[name] = sums.get(name, 0.0) + float(value) / denominators.tokens


def _reduce_sums(sums: Mapping[str, float], group: dist.ProcessGroup, device: torch.device) -> dict[str, float]:
    names = sorted(sums)
    values = torch.tensor([sums[n] for n in names], dtype=torch.float64, device=device)
    if group.size() > 1:
        dist.all_reduce(values, group=group)
    return dict(zip(names, np.asarray(values.cpu()).tolist(), strict=True))
