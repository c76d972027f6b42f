"""Define the sections of optimizers: what they do with gradients, and where and how they keep their state."""

import math
from dataclasses import dataclass
from typing import Literal

from megarl.config.setting import AT_LEAST_0, BELOW_1, FRACTION, POSITIVE, SHARE, Range, setting
from megarl.config.target import has_package, package_version
from megarl.errors import ConfigError
from megarl.host.device.platform import platform

TRANSFORMER_ENGINE = "transformer_engine"


def require_kernels(setting: str, package: str, remedy: str) -> None:
    """Raise ConfigError unless this machine has CUDA and the package; the other arguments are parts of the message."""
    here = platform()
    if here.name != "cuda":
        raise ConfigError(f"{setting}, which needs CUDA, but this is {here.name}; {remedy}")
    if not has_package(package):
        raise ConfigError(f"{setting}, which needs the package {package}, but it is not installed; {remedy}")


_MUON_PACKAGE = "emerging-optimizers"
# Its release for megatron-core 0.16 and for later ones, which pass other arguments; each with what pip installs.
_EARLY_MUON = "0.1", "git+https://github.com/NVIDIA-NeMo/Emerging-Optimizers.git@v0.1.0"
_MUON = "0.3", f"{_MUON_PACKAGE}==0.3.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """Configure AdamW or Muon, with linear warm-up and a learning-rate schedule over the run's optimizer steps."""

    lr: float = setting(1e-6, POSITIVE)  # Peak learning rate.
    betas: tuple[float, float] = setting((0.9, 0.95), BELOW_1)  # Decay of the two moments.
    eps: float = setting(1e-8, POSITIVE)  # Added to the square root of the second moment.
    weight_decay: float = setting(0.01, AT_LEAST_0)  # Decoupled weight decay.
    # Gradients are scaled down if their global norm exceeds this.
    clip_grad_norm: float = setting(1.0, Range(expected="> 0 (1e9 never clips)", above=0))
    warmup_steps: int = setting(0, AT_LEAST_0)  # Optimizer steps of linear warm-up.
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # Learning-rate schedule after warm-up.
    # Fraction of the run, counted from its end, over which the learning rate decays.
    decay_frac: float = setting(1.0, SHARE)
    min_lr_frac: float = setting(0.0, FRACTION)  # Learning rate at the end of the decay, as a fraction of lr.
    distributed: bool = True  # Shard the optimizer state over the data-parallel ranks.
    # Sum gradients over the data-parallel ranks while backward computes further ones; null: on CUDA.
    overlap_grad_reduce: bool | None = None
    # Sum gradients over micro-batches and ranks in float32. false: in model.dtype, which takes half of the memory and
    # traffic for bfloat16, and rounds every sum.
    grad_reduce_in_fp32: bool = True
    # Gather the updated weights of the data-parallel ranks while the next forward pass computes with those that have
    # arrived; needs `distributed` and `overlap_grad_reduce`. null: on CUDA, where these are on and no state is on the
    # host.
    overlap_param_gather: bool | None = None
    # Share of the parameters whose state stays on the host, where CPUs update it during the step (megatron-core's
    # hybrid optimizer); needs CUDA, Transformer Engine and `distributed`.
    offload_fraction: float = setting(0.0, FRACTION)
    # Data type in which the first moment is kept; others than float32 need CUDA, Transformer Engine and `distributed`.
    exp_avg_dtype: Literal["float32", "bfloat16", "float8"] = "float32"
    exp_avg_sq_dtype: Literal["float32", "bfloat16", "float8"] = "float32"  # The same for the second moment.
    # adam: AdamW. muon: the matrices of layers move by their orthogonalized momentum, all else by AdamW; needs the
    # package emerging-optimizers 0.1 and distributed=false.
    algorithm: Literal["adam", "muon"] = "adam"
    muon_momentum: float = setting(0.95, BELOW_1)  # Decay of Muon's momentum.
    # Factor of Muon's updates, which are also multiplied by the square root of the matrix's longer side. With 0.2 they
    # are about as large as AdamW's at the same learning rate.
    muon_scale: float = setting(0.2, POSITIVE)

    @property
    def overlaps_grad_reduce(self) -> bool:
        """Return whether gradients are summed during backward, also where that is derived."""
        return platform().name == "cuda" if self.overlap_grad_reduce is None else self.overlap_grad_reduce

    @property
    def overlaps_param_gather(self) -> bool:
        """Return whether weights are gathered during the next forward pass, also where that is derived."""
        if self.overlap_param_gather is None:
            can = self.distributed and self.overlaps_grad_reduce and not self.offload_fraction
            return can and platform().name == "cuda"
        return self.overlap_param_gather

    @property
    def is_precision_aware(self) -> bool:
        """Return whether Transformer Engine's Adam, or the hybrid one, keeps the state instead of megatron-core."""
        return self.offload_fraction > 0 or (self.exp_avg_dtype, self.exp_avg_sq_dtype) != ("float32", "float32")

    def check(self, key: str) -> None:
        """Raise ConfigError for a kind of state or of communication that this machine or other settings do not have."""
        if self.algorithm == "muon":
            self._check_muon(key)
        neutral = {"offload_fraction": 0.0, "exp_avg_dtype": "float32", "exp_avg_sq_dtype": "float32"}
        changed = [name for name, value in neutral.items() if getattr(self, name) != value]
        for name in changed:
            got, remedy = f"{key}.{name}: got {getattr(self, name)}", f"set {key}.{name}={neutral[name]}"
            require_kernels(got, TRANSFORMER_ENGINE, remedy)
        for name in (*changed, *(["overlap_param_gather"] if self.overlap_param_gather else [])):
            if not self.distributed:
                raise ConfigError(
                    f"{key}.{name}: needs {key}.distributed=true, whose shards it is about; set that, or leave {name} "
                    "out"
                )
        if self.overlap_param_gather and not self.overlaps_grad_reduce:
            raise ConfigError(
                f"{key}.overlap_param_gather: got true without {key}.overlap_grad_reduce, which divides the weights "
                f"into the buckets that are gathered; set {key}.overlap_grad_reduce=true"
            )
        if self.offload_fraction and len(changed) > 1:
            raise ConfigError(
                f"{key}.{changed[1]}: got {getattr(self, changed[1])} with {key}.offload_fraction="
                f"{self.offload_fraction:g}, but on the host both moments are float32; set one of them back"
            )

    def _check_muon(self, key: str) -> None:
        if self.distributed:
            raise ConfigError(
                f"{key}.algorithm: got muon with {key}.distributed=true, but it needs whole matrices; set "
                f"{key}.distributed=false"
            )
        found, megatron = package_version(_MUON_PACKAGE) or "none", package_version("megatron-core") or "none"
        needed, source = _EARLY_MUON if megatron.startswith("0.16.") else _MUON
        if not found.startswith(f"{needed}."):
            raise ConfigError(
                f"{key}.algorithm: got muon, for which megatron-core {megatron} needs {_MUON_PACKAGE} {needed}, but "
                f"{found} is installed; with Python 3.12, `pip install --no-deps {source} absl-py`, or set "
                f"{key}.algorithm=adam"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticOptimizerConfig(OptimizerConfig):
    """Configure the critic's optimizer, with the keys of actor.optimizer; its steps are counted separately."""

    lr: float = setting(1e-5, POSITIVE)  # Peak learning rate.


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Compute the learning rate of optimizer step `step` (0-based) of `total_steps`.

    Linear warm-up to `lr` over `warmup_steps`, at most over the whole run; then constant; over the last `decay_frac` of
    the run the rate falls, linearly or along a half cosine, to `lr · min_lr_frac`.
    """
    warmup_steps = min(config.warmup_steps, total_steps)
    warmup = min(1.0, (step + 1) / warmup_steps) if warmup_steps > 0 else 1.0
    if config.schedule == "constant":
        return config.lr * warmup
    decay_steps = max(1.0, config.decay_frac * total_steps)
    remaining = min(1.0, (total_steps - step) / decay_steps)
    shape = remaining if config.schedule == "linear" else 0.5 * (1.0 - math.cos(math.pi * remaining))
    return config.lr * warmup * (config.min_lr_frac + (1.0 - config.min_lr_frac) * shape)
