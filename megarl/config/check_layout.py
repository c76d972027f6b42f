"""Check parallel layouts: divisibility, and combinations for which Megatron computes wrong results."""

from collections.abc import Mapping
from math import gcd

from megarl.config.schema import Config, LayoutConfig
from megarl.errors import ConfigError


def check_layout(layout: LayoutConfig, where: str) -> None:
    """Raise ConfigError unless a layout is consistent in itself. `where`: its key, such as `actor.layout`."""
    if layout.sequence_parallel and layout.tp == 1:
        raise ConfigError(
            f"{where}.sequence_parallel: got true with tp=1, but it shards over tensor-parallel ranks; "
            f"set {where}.sequence_parallel=false or {where}.tp >= 2"
        )
    uneven = [n for n in ("first_stage_layers", "last_stage_layers") if getattr(layout, n) is not None]
    if layout.pp == 1 and (uneven or layout.virtual_pp > 1):
        name = uneven[0] if uneven else "virtual_pp"
        raise ConfigError(
            f"{where}.{name}: got {getattr(layout, name)} with pp=1, but there is only one stage; "
            f"remove it or set {where}.pp >= 2"
        )
    if uneven and layout.virtual_pp > 1:
        raise ConfigError(
            f"{where}.{uneven[0]}: uneven stages do not combine with virtual_pp={layout.virtual_pp}; remove one of them"
        )
    if layout.virtual_pp > 1 and layout.pp == 2 and not layout.overlap_p2p:
        raise ConfigError(
            f"{where}.virtual_pp: got {layout.virtual_pp} at pp=2 without overlapped communication, which Megatron "
            f"computes silently wrong; set {where}.overlap_p2p=true"
        )
    if layout.stage_size % (layout.ep * layout.etp):
        raise ConfigError(
            f"{where}.ep: ep {layout.ep} × etp {layout.etp} = {layout.ep * layout.etp}, expected a divisor of the "
            f"tp {layout.tp} × cp {layout.cp} × dp {layout.dp} = {layout.stage_size} ranks of a pipeline stage, over "
            f"which experts are split; change one of them"
        )


def check_role_layouts(config: Config) -> None:
    """Raise ConfigError unless each role's own layout is consistent and needs no more ranks than the actor's."""
    size = config.actor.layout.world_size
    own = {
        "reference": config.reference.layout,
        "critic": config.critic.layout,
        "reward_model": config.reward_model.layout,
    }
    for role, layout in own.items():
        if layout is None:
            continue
        check_layout(layout, f"{role}.layout")
        if layout.world_size > size:
            raise ConfigError(
                f"{role}.layout: tp {layout.tp} × pp {layout.pp} × cp {layout.cp} × dp {layout.dp} = "
                f"{layout.world_size} ranks, expected <= {size}, those of actor.layout, whose devices they use; "
                f"lower it, raise actor.layout, or set {role}.layout=null"
            )


def model_dimension(hf_config: Mapping[str, object], name: str, role: str) -> int:
    """Return the size `name` from the config.json of a role's model. Raises ConfigError unless it is a positive int."""
    value = hf_config.get(name)
    if type(value) is not int or value < 1:
        key = "model.path" if role == "actor" else f"{role}.model_path"
        raise ConfigError(f"{key}: config.json has {name}={value!r}, expected a positive int; is it a causal LM?")
    return value


def divisors(number: int) -> str:
    """Return the divisors of a number as text for messages."""
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def check_tp(layout: LayoutConfig, hf_config: Mapping[str, object], role: str) -> None:
    """Raise ConfigError unless tp divides the numbers of heads and the widths of a role's model."""
    names = ["num_attention_heads", "num_key_value_heads", "intermediate_size"]
    if hf_config.get("num_key_value_heads") is None:  # as many as query heads
        names.remove("num_key_value_heads")
    dimensions = {name: model_dimension(hf_config, name, role) for name in names}
    undivided = [f"{name}={size}" for name, size in dimensions.items() if size % layout.tp]
    if undivided:
        valid = divisors(gcd(*dimensions.values()))
        raise ConfigError(
            f"{role}.layout.tp: got {layout.tp}, which does not divide the model's {' and '.join(undivided)}; "
            f"valid values: {valid}"
        )


def check_stages(layout: LayoutConfig, hf_config: Mapping[str, object], where: str) -> None:
    """Raise ConfigError unless the layers divide evenly over the pipeline stages (and virtual chunks) without a set
    number.
    """
    if layout.pp == 1:
        return
    num_layers = int(str(hf_config["num_hidden_layers"]))
    named = [n for n in (layout.first_stage_layers, layout.last_stage_layers) if n is not None]
    rest, stages = num_layers - sum(named), layout.pp - len(named)
    if rest < stages or (stages == 0 and rest) or (stages and rest % (stages * layout.virtual_pp)):
        raise ConfigError(
            f"{where}: {num_layers} layers do not split over pp={layout.pp} stages"
            f"{f' of {layout.virtual_pp} chunks' if layout.virtual_pp > 1 else ''} "
            f"(first_stage_layers={layout.first_stage_layers}, last_stage_layers={layout.last_stage_layers}); "
            f"set {where}.first_stage_layers or last_stage_layers so that the rest divides evenly"
        )
