"""How fast the trainer computes: FLOPs that the model's mathematics asks for, against time and the device's peak."""

from collections.abc import Sequence

from megarl.config.schema import Config
from megarl.device.accelerators import peak_tflops
from megarl.device.platform import platform
from megarl.types import Row
from megarl.weights.families import Dims

# Backward computes gradients of inputs and of weights: two matrix products for each one of forward.
FORWARD_AND_BACKWARD = 3


def forward_flops(dims: Dims, *, num_tokens: int, num_scored_tokens: int) -> int:
    """FLOPs of one forward pass over a row of n tokens, of which r meet the output head.

    2·n·L·(2·h·q + 2·h·k + 3·h·f)      matrix products of L layers: query and output, key and value, MLP
    + L·(q + v)·n²                     causal attention: scores and weighted values, half of n² each
    + 2·r·V·h                          output head
    h: hidden size; q, k, v: sizes of all query, all key and all values' heads (v = q without latents); f: width of the
    MLP; V: vocabulary. In a layer with E experts 3·h·f is 3·h·(width of those that see a token, and of shared ones)
    + h·E; with latent attention 2·h·q + 2·h·k are the products into and out of latents, and with the output. What
    recompute and padding cost does not count, nor do norms and other element-wise work.
    """
    layers = sum(_mlp_products(dims, layer) for layer in range(dims.num_layers))
    products = 2 * num_tokens * (dims.num_layers * _attention_products(dims) + layers)
    heads = dims.dim("q") + dims.dim("values" if dims.latent else "q")
    attention = dims.num_layers * heads * num_tokens**2
    return products + attention + 2 * num_scored_tokens * dims.vocab * dims.hidden


def _attention_products(dims: Dims) -> int:
    """Multiplications per token of the projections of a layer's attention."""
    hidden, latent, q = dims.hidden, dims.latent, dims.dim("q")
    if latent is None:
        return 2 * hidden * q + 2 * hidden * dims.dim("kv")
    queries = latent.q_latent * (hidden + q) if latent.q_latent else hidden * q
    keys = hidden * dims.dim("kv_latent_and_rope") + latent.kv_latent * dims.dim("keys_and_values")
    return queries + keys + hidden * dims.dim("values")


def _mlp_products(dims: Dims, layer: int) -> int:
    """Multiplications per token of a layer's MLP, or of its router and the experts that see the token."""
    experts = dims.experts
    if experts is None or layer not in experts.layers:
        return 3 * dims.hidden * dims.ffn
    return 3 * dims.hidden * (experts.per_token * experts.ffn + experts.shared_ffn) + dims.hidden * experts.num


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
