"""Measure the mismatch between engine and trainer, and stop a run before its first update if it is too large."""

from collections.abc import Mapping, Sequence

import torch

from megarl.algos.corrections import CORRECTIONS, CorrectionInputs, compute_correction
from megarl.algos.mismatch import MismatchSums, mismatch_sums
from megarl.algos.prefixes import DEMONSTRATION
from megarl.algos.staleness import drift_metrics, staleness_metrics
from megarl.config.algo import CorrectionConfig
from megarl.config.engine import EngineConfig
from megarl.config.models import ModelConfig
from megarl.config.schema import TrainerConfig
from megarl.errors import MismatchError
from megarl.types import BoolArray, FloatArray, Row, TokenQuantity, length_blocks, pad_rows
from megarl.types.rows import LAG

# Mean |Δ log-prob| between engine and trainer above which training would optimise a different policy.
MISMATCH_GATE_NATS = {"float32": 1e-4, "bfloat16": 0.05}
# The same for engines that round weights or the KV cache to float8, which has a 16th of bfloat16's precision.
FLOAT8_GATE_NATS = 0.2


def mismatch_of(rows: Sequence[Row], logprobs: Sequence[FloatArray]) -> MismatchSums:
    """Compare the trainer's log-probs [R] of each row with the engine's, on tokens that the engine sampled from the
    trainer's weights: on stale tokens they differ because of the updates since then.
    """
    sums = MismatchSums()
    for block in length_blocks([row.num_response_tokens for row in rows]):
        fresh = [_sampled(rows[i]) & (rows[i].quantities.get(LAG, 0) == 0) for i in block]
        sums = sums.merged(
            mismatch_sums(
                pad_rows([rows[i].quantities["rollout_logprobs"] for i in block], dtype=torch.float32),
                pad_rows([logprobs[i] for i in block], dtype=torch.float32),
                pad_rows(fresh, dtype=torch.bool),
            )
        )
    return sums


def trainer_logprobs(rows: Sequence[Row], before: Mapping[int, FloatArray]) -> dict[int, FloatArray]:
    """Return the trainer's log-probs from before the update, scored or else of `before`, by index of their rows."""
    known = {i: row.quantities.get(TokenQuantity.OLD_LOGPROBS, before.get(i)) for i, row in enumerate(rows)}
    return {i: logprobs for i, logprobs in known.items() if logprobs is not None}


def engine_metrics(
    rows: Sequence[Row], before: Mapping[int, FloatArray], correction: CorrectionConfig
) -> dict[str, float]:
    """Return how far the engine's log-probs are from the trainer's old ones: mismatch/* on fresh tokens, staleness/* if
    rows know their lags, and is/* if the correction did not know the old log-probs when it was computed.

    before: the trainer's log-probs from before its first optimizer step, by row index. They stand in for the old ones;
    a row that has neither is not compared.
    """
    known = trainer_logprobs(rows, before)
    compared, logprobs = [rows[i] for i in known], list(known.values())
    metrics: dict[str, float] = {}
    sums = mismatch_of(compared, logprobs)
    # Where no token is fresh, 0 would look like perfect agreement.
    if sums.num_tokens or LAG not in rows[0].quantities:
        metrics |= sums.metrics()
    is_stale = LAG in rows[0].quantities
    is_new = CORRECTIONS.get(correction.name).rollout_ratio and TokenQuantity.OLD_LOGPROBS not in rows[0].quantities
    if not (is_stale or is_new):
        return metrics
    old, rollout = (
        pad_rows(values, dtype=torch.float32)
        for values in (logprobs, [row.quantities["rollout_logprobs"] for row in compared])
    )
    sampled = pad_rows([_sampled(row) for row in compared], dtype=torch.bool)
    if is_stale:
        lag = pad_rows([row.quantities[LAG] for row in rows], dtype=torch.float32)
        metrics |= staleness_metrics(lag, pad_rows([_sampled(row) for row in rows], dtype=torch.bool))
        lag = pad_rows([row.quantities[LAG] for row in compared], dtype=torch.float32)
        metrics |= drift_metrics(lag, sampled, rollout_logprobs=rollout, old_logprobs=old)
    if is_new:
        inputs = CorrectionInputs(
            old_logprobs=old,
            rollout_logprobs=rollout,
            # Only rejected tokens' advantages count, and only a veto, which needs old log-probs, would reject any.
            advantages=torch.zeros_like(old),
            loss_mask=sampled,
            demonstration_mask=torch.zeros_like(sampled),
        )
        metrics |= compute_correction(inputs, correction).metrics
    return metrics


def _sampled(row: Row) -> BoolArray:
    """Mark the loss tokens that an engine sampled."""
    given = row.quantities.get(DEMONSTRATION)
    return row.loss_mask if given is None else row.loss_mask & (given == 0)


class MismatchGate:
    """A check that refuses to train if log-probs of engine and trainer disagree before the first update."""

    def __init__(self, trainer: TrainerConfig, model: ModelConfig, engine: EngineConfig) -> None:
        dtypes = {model.dtype, engine.dtype or model.dtype}
        rounded = engine.quantization is not None or engine.kv_cache_dtype is not None
        usual = FLOAT8_GATE_NATS if rounded else max(MISMATCH_GATE_NATS[dtype] for dtype in dtypes)
        self.limit = trainer.mismatch_gate_nats or usual
        self.passed = False

    def check(self, rows: Sequence[Row]) -> None:
        """Compare the rows' old log-probs with the engine's. Raises MismatchError above the limit.

        The first comparison with sampled tokens opens the gate for the rest of the run; later calls do nothing.
        """
        if self.passed:
            return
        sums = mismatch_of(rows, [row.quantities[TokenQuantity.OLD_LOGPROBS] for row in rows])
        measured = sums.metrics()["mismatch/abs_mean"]
        if not measured <= self.limit:
            raise MismatchError(
                f"the engine's log-probs differ from the trainer's by {measured:.2e} nats on average before the first "
                f"update, the limit is {self.limit:.0e} (trainer.mismatch_gate_nats); check that both use the same "
                f"weights, dtype and temperature (`megarl bisect RUN` names the tensor and the cause, sync.verify=true "
                f"compares every tensor)"
            )
        self.passed = sums.num_tokens > 0
