"""Rules of a parallel layout: what must divide what, and what Megatron computes wrongly."""

from collections.abc import Mapping

from megarl.config.schema import LayoutConfig
from megarl.errors import ConfigError


def check_layout(layout: LayoutConfig, where: str) -> None:
    """Rules that need nothing but the layout; `where` is its key, such as `actor.layout`."""
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


def check_stages(layout: LayoutConfig, hf_config: Mapping[str, object], where: str) -> None:
    """The model's layers fill the pipeline's stages (and their model chunks) evenly, but for named exceptions."""
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
