"""Check settings that need kernels of a device, of Transformer Engine or of DeepEP: float8, those for experts, and
those whose results do not depend on the rest of a batch.
"""

from collections.abc import Iterator
from importlib.util import find_spec

from megarl.config.schema import Config, role_settings
from megarl.errors import ConfigError
from megarl.host.device.accelerators import FP8_RECIPES
from megarl.host.device.platform import platform


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


def check_batch_invariance(config: Config) -> None:
    """Raise ConfigError for `run.batch_invariant` where a result would depend on what else is in its batch."""
    if not config.run.batch_invariant:
        return
    here = platform()
    hindrances = {
        f"on {here.name}, whose matrix products depend on the number of tokens": not here.has_batch_invariance,
        "without Transformer Engine, for whose layers Megatron has such kernels": not find_spec("transformer_engine"),
        "without the package flash_attn or flash_attn_3, whose attention these kernels need": not (
            find_spec("flash_attn") or find_spec("flash_attn_3")
        ),
        f"with actor.fp8={config.actor.fp8}, for which Megatron has no such kernels": config.actor.fp8 is not None,
        **{
            f"with {role}.layout.tp={own.layout.tp}, where NCCL adds parts in an order that depends on their size": (
                own.layout.tp > 2
            )
            for role, own in role_settings(config).items()
        },
        **{
            f"on {device.name}, for which vLLM has no such kernels": (device.capability or 8.0) < 8.0
            for device in here.devices()
        },
    }
    if found := next((what for what, hinders in hindrances.items() if hinders), None):
        raise ConfigError(f"run.batch_invariant: got true {found}; change either")


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
