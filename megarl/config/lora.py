"""Define the section of adapters, which are trained in place of a model's weights."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from megarl.config.setting import AT_LEAST_1, POSITIVE, setting
from megarl.errors import ConfigError
from megarl.host.device.platform import platform

# The ranks that vLLM's engines make room for.
ENGINE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
Target: TypeAlias = Literal["attention", "mlp", "experts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Train adapters W + alpha/rank·B·A in place of the weights W, which stay as they were read (LoRA; Hu et al. 2021,
    arXiv:2106.09685). They need about ten times the learning rate of weights (docs/adapters.md).
    """

    rank: int = setting(32, AT_LEAST_1)  # Columns of B and rows of A.
    alpha: float = setting(32.0, POSITIVE)  # The update B·A is multiplied by alpha/rank.
    # Which linear layers have adapters: those of attention, of dense MLPs and shared experts, of experts.
    targets: tuple[Target, ...] = ("attention", "mlp", "experts")
    # The rank of the experts' adapters; null: rank divided by the experts of a token, at least 1.
    expert_rank: int | None = setting(None, AT_LEAST_1)
    # How adapters reach engines. adapter: alone, to engines that have read the base; merged: in weights, computed in
    # float32 and rounded to model.dtype. auto: adapter on CUDA; on CPUs, where adapters slow engines down, merged, with
    # model.dtype=float32 alone.
    sync: Literal["auto", "adapter", "merged"] = "auto"
    # Directory with adapters to begin with, as PEFT writes them; null: A is random, B is 0.
    path: str | None = None
    # The export of a run. adapter: a directory as PEFT writes it, export_adapter; merged: a model with the adapters
    # merged into its weights in float32, export, which is then rounded to model.dtype.
    export: Literal["adapter", "merged", "both"] = "adapter"

    @property
    def engine_rank(self) -> int:
        """Return the rank that vLLM's engines make room for."""
        needed = max(self.rank, self.expert_rank or 1)
        return next((rank for rank in ENGINE_RANKS if rank >= needed), needed)

    def check(self, key: str) -> None:
        """Raise ConfigError for no targets, or a target that is named twice."""
        if not self.targets or len(set(self.targets)) < len(self.targets):
            raise ConfigError(
                f"{key}.targets: got {list(self.targets)}, expected one or more of attention, mlp, experts, each once"
            )


def sent_alone(lora: LoraConfig | None) -> LoraConfig | None:
    """Return the adapters that weight syncs send in place of weights, to engines that have read the base themselves.

    None: there are no adapters, or syncs send weights that contain them.
    """
    if lora is None or lora.sync == "merged" or (lora.sync == "auto" and platform().name != "cuda"):
        return None
    return lora
