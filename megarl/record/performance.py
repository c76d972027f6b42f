"""Measure model FLOPs per second against the device's peak, and take profiler traces of chosen steps."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from megarl.config.schema import LoggingConfig
from megarl.host.device.accelerators import peak_tflops
from megarl.host.device.platform import platform
from megarl.types import Row
from megarl.types.prefixes import count_shared, family_order
from megarl.weights.families import Dims
from megarl.weights.towers import Tower

# Phases whose time depends on the tokens of a step, by verl's names.
_TOKEN_PHASES = ("gen", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")

# Backward computes gradients of inputs and of weights: two matrix products for each one of forward.
FORWARD_AND_BACKWARD = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StopForecast:
    """Seconds that a planned step is expected to take, those in which a signal does not cut it short, and those of a
    checkpoint. host: the least bytes of host memory that the fullest node needs, by what needs them.
    """

    step: float
    uncut: float
    checkpoint: float
    host: Mapping[str, int] = field(default_factory=dict)


def forward_flops(dims: Dims, *, num_tokens: int, num_head_tokens: int) -> int:
    """Count the FLOPs of one forward pass over a row of n tokens, r of which reach the output head.

    2·n·L·(2·h·q + 2·h·k + 3·h·f)      matrix products of L layers: query and output, key and value, MLP
    + L·(q + v)·w·(2·n − w)            causal attention: scores and weighted values, n·w − w²/2 each
    + 2·n·(h·(2·k' + 3·v' + 2·H) + c·(2·k' + v') + 3·v'·d)    in each of the layers with a gated delta net, in place of
                                       attention: products in and out, convolution, and a state faded, corrected, read
    + 2·r·V·h                          output head
    h: hidden size; q, k, v: sizes of all query, all key and all values' heads (v = q without latents); f: width of the
    MLP; V: vocabulary; w: the layer's window, n without one or in shorter rows. In a layer with E experts 3·h·f is
    3·h·(width of those that see a token, and of shared ones) + h·E; with latent attention 2·h·q + 2·h·k are the
    products into and out of latents, and with the output. Recompute and padding do not count, nor do norms and other
    element-wise work. Output gates add h·q. k', v', H, d, c: sizes of all key and all value heads, number of these,
    width of a key head, width of the convolution.
    """
    hidden, latent, experts, q = dims.hidden, dims.latent, dims.experts, dims.dim("q")
    # Multiplications per token of the projections of a layer's attention.
    if latent is None:
        projections = 2 * hidden * q + 2 * hidden * dims.dim("kv")
        projections += hidden * q if dims.gated else 0
    else:
        queries = latent.q_latent * (hidden + q) if latent.q_latent else hidden * q
        keys = hidden * dims.dim("kv_latent_and_rope") + latent.kv_latent * dims.dim("keys_and_values")
        projections = queries + keys + hidden * dims.dim("values")
    # Multiplications per token of all layers' MLPs, or of their routers and the experts that see the token.
    num_sparse = 0 if experts is None else len(experts.layers)
    mlps = (dims.num_layers - num_sparse) * 3 * hidden * dims.ffn
    if experts is not None:
        sparse = 3 * hidden * (experts.per_token * experts.ffn + experts.shared_ffn) + hidden * experts.num
        mlps += num_sparse * sparse
    num_linear = 0 if dims.delta is None else len(dims.delta.layers)
    mixing = (dims.num_layers - num_linear) * projections + num_linear * _delta_products(dims)
    products = 2 * num_tokens * (mixing + mlps)
    attention = (q + dims.dim("values" if latent else "q")) * attended(dims, num_tokens)
    return products + attention + 2 * num_head_tokens * dims.vocab * hidden


def _delta_products(dims: Dims) -> int:
    """Return the multiplications per token of a layer's gated delta net, or 0 for a model without them."""
    if (delta := dims.delta) is None:
        return 0
    keys, values = dims.dim("delta_keys"), dims.dim("delta_values")
    projections = dims.hidden * (dims.dim("delta_qkvz") + dims.dim("delta_ba") + values)
    return projections + delta.conv_width * (2 * keys + values) + 3 * values * delta.key_dim


def attended(dims: Dims, num_tokens: int) -> int:
    """Return twice the number of pairs of tokens in a row that attend to each other, over all layers."""
    windows = (dims.window_of(layer, num_tokens) for layer in range(dims.num_layers))
    return sum(window * (2 * num_tokens - window) for window in windows)


def image_flops(tower: Tower | None, rows: Sequence[Row], *, backward: bool = False) -> int:
    """Count the FLOPs with which a tower reads the images of rows, each different one once, as in a micro-batch."""
    if tower is None:
        return 0
    images = {image.digest: len(image.places) for row in rows for image in row.images}
    return sum(tower.work.flops(each, tower.part if backward else "none") for each in images.values())


def update_flops(dims: Dims, rows: Sequence[Row], *, shares_prefixes: bool = False, tower: Tower | None = None) -> int:
    """Count the FLOPs of one forward and backward pass over rows; shares_prefixes: what they have in common is computed
    once. tower: with what their images are read.
    """
    counts = [(row.num_tokens, int(row.predicted.sum())) for row in rows]
    flops = sum(forward_flops(dims, num_tokens=total, num_head_tokens=count) for total, count in counts)
    if shares_prefixes:
        shared = (count_shared(rows[a], rows[b]) for a, b in itertools.pairwise(family_order(rows)))
        flops -= sum(forward_flops(dims, num_tokens=count, num_head_tokens=0) for count in shared if count)
    return FORWARD_AND_BACKWARD * flops + image_flops(tower, rows, backward=True)


def peak_of(logging: LoggingConfig, dtype: str) -> float | None:
    """Return a device's peak TFLOP/s: as configured, or the lowest known among this host's devices; else None."""
    if logging.peak_tflops:
        return logging.peak_tflops
    peaks = [peak_tflops(device.name, dtype) for device in platform().devices()]
    return min((peak for peak in peaks if peak is not None), default=None)


class PerformanceMeter:
    """A meter of the throughput of a run's optimizer steps."""

    def __init__(
        self,
        dims: Dims,
        *,
        num_ranks: int,
        num_epochs: int,
        peak_tflops: float | None,
        shares_prefixes: bool = False,
        tower: Tower | None = None,
    ) -> None:
        self._tower, self._dims, self._num_ranks, self._num_epochs = tower, dims, num_ranks, num_epochs
        self._peak_tflops, self._shares_prefixes = peak_tflops, shares_prefixes

    def metrics(self, rows: Sequence[Row], update_s: float) -> dict[str, float]:
        """Return `perf/tflops_per_rank` (TFLOP/s) of the updates on these rows, all epochs in `update_s` seconds.

        `perf/mfu` is the same as a share of the device's peak; it is left out if the peak is neither configured nor
        known.
        """
        flops = update_flops(self._dims, rows, shares_prefixes=self._shares_prefixes, tower=self._tower)
        tflops = self._num_epochs * flops / update_s / self._num_ranks / 1e12
        measured = {"perf/tflops_per_rank": tflops}
        return measured | ({"perf/mfu": tflops / self._peak_tflops} if self._peak_tflops else {})


def token_times(times: Mapping[str, float], rows: Sequence[Row]) -> dict[str, float]:
    """Return the throughput of a step, and milliseconds per token of its phases.

    perf/tokens_per_s: the rows' tokens divided by the step's seconds. timing_per_token_ms/PHASE: a phase's time divided
    by the response tokens (for generation) or all tokens (for other phases). times: timing_s/PHASE of the phases that
    ran.
    """
    num_response = max(1, sum(len(row.loss_mask) for row in rows))
    num_tokens = max(1, sum(row.num_tokens for row in rows))
    phases = {name.removeprefix("timing_s/"): seconds for name, seconds in times.items()}
    return {"perf/tokens_per_s": num_tokens / phases["step"]} | {
        f"timing_per_token_ms/{phase}": 1000 * seconds / (num_response if phase == "gen" else num_tokens)
        for phase, seconds in phases.items()
        if phase in _TOKEN_PHASES
    }


class ProfiledWorkers(Protocol):
    """The interface that `StepProfiler` needs from a group of ranks."""

    def start_profile(self) -> None: ...

    def stop_profile(self, directory: Path) -> None: ...


class StepProfiler:
    """Takes profiler traces of the training steps from the first to the last of `steps`; None: of no step."""

    def __init__(self, workers: ProfiledWorkers, steps: tuple[int, int] | None, directory: Path) -> None:
        self._workers, self._steps, self._directory = workers, steps, directory
        self._is_running = False

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Profile the step that runs in this context, if it is in the window; a resumed run may begin inside the
        window.
        """
        if self._steps is not None and self._steps[0] <= step <= self._steps[1] and not self._is_running:
            self._workers.start_profile()
            self._is_running = True
        yield
        if self._is_running and self._steps is not None and step == self._steps[1]:
            self._workers.stop_profile(self._directory)
            self._is_running = False
