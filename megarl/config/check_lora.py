"""Check what adapters are trained with: kinds of layers that can have them, and how they reach the engines."""

from importlib.util import find_spec

from megarl.config.kernels import TRANSFORMER_ENGINE
from megarl.config.schema import Config
from megarl.errors import ConfigError
from megarl.host.device.platform import platform


def check_lora(config: Config) -> None:
    """Raise ConfigError for adapters on layers that cannot have them."""
    actor, lora = config.actor, config.actor.lora
    if lora is None:
        return
    if "experts" in lora.targets and actor.layout.etp > 1:
        raise ConfigError(
            f"actor.lora.targets: got experts with actor.layout.etp={actor.layout.etp}, but ranks would have to "
            "exchange what tokens of other experts' adapters add; set actor.layout.etp=1 and raise ep, or leave "
            "experts out"
        )
    if actor.fp8 is not None:
        raise ConfigError(f"actor.lora: got adapters with actor.fp8={actor.fp8}, whose layers have no place for them")
    if platform().name == "cuda" and find_spec(TRANSFORMER_ENGINE) is not None:
        raise ConfigError(
            "actor.lora: got adapters on Transformer Engine's layers, whose norms are fused with the products that "
            "adapters are added to; this has not been run yet. Train the weights (actor.lora=null)"
        )


def check_lora_sync(config: Config) -> None:
    """Raise ConfigError for weights in bfloat16 into which adapters would be merged unasked."""
    lora = config.actor.lora
    if lora is not None and lora.sync == "auto" and config.model.dtype == "bfloat16":
        raise ConfigError(
            "actor.lora.sync: got auto with model.dtype=bfloat16, but adapters reach engines merged into the weights, "
            "and rounding to bfloat16 loses small updates (2% of the elements move in a first step); set "
            "model.dtype=float32, or actor.lora.sync=merged to accept that"
        )
