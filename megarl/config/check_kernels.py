"""Check settings that need kernels of a device, of Transformer Engine or of DeepEP: float8, and those for experts."""

from collections.abc import Iterator
from importlib.util import find_spec

from megarl.config.schema import Config
from megarl.device.accelerators import FP8_RECIPES
from megarl.device.platform import platform
from megarl.errors import ConfigError


def check_kernels(config: Config) -> None:
    """Raise ConfigError unless this machine has what `actor.fp8` and the kernels of `actor.moe` need."""
    for setting, package, remedy in _wanted(config):
        here = platform()
        if here.name != "cuda":
            raise ConfigError(f"{setting}, which needs CUDA, but this is {here.name}; {remedy}")
        if find_spec(package) is None:
            raise ConfigError(f"{setting}, which needs the package {package}, but it is not installed; {remedy}")
    actor = config.actor
    if actor.fp8 is not None:
        if config.model.dtype != "bfloat16":
            raise ConfigError(
                f"actor.fp8: got {actor.fp8} with model.dtype={config.model.dtype}, expected bfloat16; change either"
            )
        recipe = FP8_RECIPES[actor.fp8]
        for device in platform().devices():
            if device.capability is not None and not recipe.runs_on(device.capability):
                raise ConfigError(
                    f"actor.fp8: got {actor.fp8}, which needs compute capability {recipe.expected}, but "
                    f"{device.name} has {device.capability:.1f}; set actor.fp8 to another recipe, or to null"
                )
    moe = actor.moe
    if moe.dispatcher == "deepep" and actor.layout.ep * actor.layout.etp == 1:
        raise ConfigError(
            "actor.moe.dispatcher: got deepep with ep=1 and etp=1, where no token leaves its rank; set "
            "actor.moe.dispatcher=alltoall, or raise actor.layout.ep"
        )
    if moe.fuse_router and moe.replay_routing:
        raise ConfigError(
            "actor.moe.fuse_router: got true with actor.moe.replay_routing=true, but the fused kernel chooses all "
            "experts itself; set one of them to false"
        )


def _wanted(config: Config) -> Iterator[tuple[str, str, str]]:
    """Yield what is set of such settings: setting and value, the package that it needs, and the remedy."""
    actor, moe = config.actor, config.actor.moe
    engine = "transformer_engine"
    if actor.fp8 is not None:
        yield f"actor.fp8: got {actor.fp8}", engine, "set actor.fp8=null"
    if moe.dispatcher == "deepep":
        yield "actor.moe.dispatcher: got deepep", "deep_ep", "set actor.moe.dispatcher=alltoall"
    for name in ("grouped_gemm", "fuse_permute", "fuse_router"):
        if getattr(moe, name):
            yield f"actor.moe.{name}: got true", engine, f"set actor.moe.{name}=false"
