"""How fast the trainer computes: FLOPs that the model's mathematics asks for, against time and the device's peak."""

from collections.abc import Sequence

from megarl.config.schema import Config
from megarl.parallel.platform import platform
from megarl.parallel.platform_devices import peak_tflops
from megarl.parallel.weights.families import Dims
from megarl.types import Row

# Backward computes gradients of inputs and of weights: two matrix products for each one of forward.
FORWARD_AND_BACKWARD = 3


def forward_flops(dims: Dims, *, num_tokens: int, num_scored_tokens: int) -> int:
    """FLOPs of one forward pass over a row of n tokens, of which r meet the output head.

    2·n·L·(2·h·q + 2·h·k + 3·h·f)      matrix products of L layers: query and output, key and value, MLP
    + 2·L·q·n²                         causal attention: scores and weighted values, half of n² each
    + 2·r·V·h                          output head
    h: hidden size; q, k: sizes of all query and all key heads; f: width of the MLP; V: vocabulary. What recompute and
    padding cost does not count, nor do norms and other element-wise work.
    """
    hidden, q = dims.hidden, dims.dim("q")
    layer = 2 * hidden * q + 2 * hidden * dims.dim("kv") + 3 * hidden * dims.ffn
    products = 2 * num_tokens * dims.num_layers * layer
    attention = 2 * dims.num_layers * q * num_tokens**2
    return products + attention + 2 * num_scored_tokens * dims.vocab * hidden


def update_flops(dims: Dims, rows: Sequence[Row]) -> int:
    """FLOPs of one forward and backward pass over rows."""
    forward = (
        forward_flops(dims, num_tokens=row.num_tokens, num_scored_tokens=int(row.loss_mask.sum())) for row in rows
    )
    return FORWARD_AND_BACKWARD * sum(forward)


class PerformanceMeter:
    """Metrics of a run's optimizer steps."""

    def __init__(self, config: Config, dims: Dims) -> None:
        self._dims, self._num_ranks = dims, config.actor.layout.world_size
        self._num_epochs = config.trainer.num_epochs
        self._peak_tflops = config.logging.peak_tflops or _known_peak(config.model.dtype)

    def metrics(self, rows: Sequence[Row], update_s: float) -> dict[str, float]:
        """`perf/tflops_per_rank` (TFLOP/s) of the updates on these rows in `update_s` seconds, all epochs together.

        `perf/mfu`, that as a share of the device's peak, where the peak is configured or known.
        """
        tflops = self._num_epochs * update_flops(self._dims, rows) / update_s / self._num_ranks / 1e12
        measured = {"perf/tflops_per_rank": tflops}
        return measured | ({"perf/mfu": tflops / self._peak_tflops} if self._peak_tflops else {})


def _known_peak(dtype: str) -> float | None:
    """The lowest known peak among this host's devices."""
    peaks = [peak for device in platform().devices() if (peak := peak_tflops(device.name, dtype)) is not None]
    return min(peaks, default=None)
