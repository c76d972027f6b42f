"""Check the settings of mixture-of-experts models, and that they are not set for other models."""

from collections.abc import Mapping

from megarl.config.check_layout import divisors, model_dimension
from megarl.config.schema import Config, LayoutConfig, MoeConfig
from megarl.errors import ConfigError

# Names that config.json files use for the number of experts and for the width of one; the first that is present counts.
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_WIDTHS = ("moe_intermediate_size", "intermediate_size")


def check_experts(layout: LayoutConfig, hf_config: Mapping[str, object], role: str) -> None:
    """Raise ConfigError unless ep and etp suit the experts and Megatron can train them; dense models need both 1."""
    where, key = f"{role}.layout", _first(NUM_EXPERTS, hf_config)
    if key is None:
        for name in ("ep", "etp"):
            if (size := getattr(layout, name)) > 1:
                raise ConfigError(
                    f"{where}.{name}: got {size}, but the model has no experts to split; set {where}.{name}=1"
                )
        return
    _require_divisor(layout.ep, f"{where}.ep", key, model_dimension(hf_config, key, role))
    width = _first(_WIDTHS, hf_config) or _WIDTHS[0]
    _require_divisor(layout.etp, f"{where}.etp", width, model_dimension(hf_config, width, role))
    if layout.tp > 1 and not layout.sequence_parallel:
        raise ConfigError(
            f"{where}.sequence_parallel: got false with tp={layout.tp}, but Megatron trains models with experts only "
            f"with it; set {where}.sequence_parallel=true or {where}.tp=1"
        )


def check_moe_settings(config: Config, hf_config: Mapping[str, object]) -> None:
    """Raise ConfigError for settings that a model with experts, or one without, does not allow."""
    if _first(NUM_EXPERTS, hf_config) is None and config.actor.moe != MoeConfig():
        raise ConfigError("actor.moe: is set, but the model has no experts; remove it")
    if _first(NUM_EXPERTS, hf_config) is not None and config.run.batch_invariant:
        raise ConfigError(
            "run.batch_invariant: got true for a model with experts, for whose products Megatron has no kernels that "
            "do not depend on the number of tokens; set run.batch_invariant=false"
        )
    if config.actor.moe.fuse_router and (num_groups := int(str(hf_config.get("n_group") or 1))) > 1:
        raise ConfigError(
            f"actor.moe.fuse_router: got true, but the model has n_group={num_groups}, and the fused kernel rates "
            f"groups of experts in its own way; set actor.moe.fuse_router=false"
        )


def check_expert_width(config: Config, hf_config: Mapping[str, object], multiple: int) -> None:
    """Raise ConfigError unless an expert's width per engine worker is a multiple of `multiple`.

    vLLM pads other widths, and a weight sync cannot load weights into padded experts.
    """
    name, tp = _first(_WIDTHS, hf_config), 1 if config.rollout.engine.expert_parallel else config.rollout.engine.tp
    if _first(NUM_EXPERTS, hf_config) is None or name is None:
        return
    width = model_dimension(hf_config, name, "actor")
    if width % (tp * multiple):
        valid = [n for n in range(1, width + 1) if width % (n * multiple) == 0]
        remedy = f"set rollout.engine.tp to one of {', '.join(map(str, valid))}" if valid else "use another model"
        raise ConfigError(
            f"rollout.engine.tp: got {tp}, so an engine's worker has {width / tp:g} of {name}={width} of each expert, "
            f"expected a multiple of {multiple}: vLLM pads others on this device, and padded experts cannot take new "
            f"weights; {remedy}, or run on CUDA"
        )


def check_replayed_routing(config: Config, *, captured: bool) -> None:
    """Raise ConfigError for `actor.moe.replay_routing` where nothing says to which experts tokens went.

    captured: whether engines on this device can say it; then settings must let each say it of all tokens of a sample.
    """
    rollout = config.rollout
    if not config.actor.moe.replay_routing or rollout.source == "replay":
        return
    where = f"actor.moe.replay_routing: got true with rollout.source={rollout.source}"
    if rollout.source != "vllm" or not captured:
        raise ConfigError(
            f"{where}, but only a record, or vLLM on CUDA, can say to which experts its tokens went; set "
            "rollout.source=replay, or actor.moe.replay_routing=false"
        )
    hindrances = {
        "rollout.engine.prefix_caching=false": not rollout.engine.prefix_caching,
        "run.deterministic=true": config.run.deterministic,
        "rollout.engine.pp > 1": rollout.engine.pp > 1,
        "rollout.schedule.on_update=continue": rollout.schedule.on_update == "continue",
        "algo.demonstrations": config.algo.demonstrations.strategy != "none",
    }
    if found := [name for name, is_set in hindrances.items() if is_set]:
        raise ConfigError(
            f"{where} and {found[0]}, with which engines cannot say of all tokens to which experts they went; change "
            "either"
        )


def _first(names: tuple[str, ...], hf_config: Mapping[str, object]) -> str | None:
    return next((name for name in names if hf_config.get(name) is not None), None)


def _require_divisor(divisor: int, where: str, name: str, size: int) -> None:
    if size % divisor:
        raise ConfigError(
            f"{where}: got {divisor}, which does not divide the model's {name}={size}; valid values: {divisors(size)}"
        )
