"""Pack rows for one or several models of a layout, which may need different things in a pack."""

from collections.abc import Sequence

from megarl.host.device.accelerators import FP8_RECIPES
from megarl.host.device.platform import platform
from megarl.parallel.model import PackedModel
from megarl.parallel.packing import Pack, PackAlignment, pack_rows
from megarl.types import Row


def pack_for(models: Sequence[PackedModel], rows: Sequence[Row]) -> Pack:
    """Pack rows such that all these models can read them; the first one may send tokens to the experts recorded."""
    return pack_rows(
        rows,
        alignment=alignment_of(models),
        device=platform().device(),
        plans_attention=any(each.plans_attention for each in models),
        shares_prefixes=all(each.shares_prefixes for each in models),
        gathers_keys=any(each.gathers_keys for each in models),
        plans_blocks=any(each.plans_blocks for each in models),
        replay_routing=models[0].replays_routing,
        has_mrope=any(each.mrope is not None for each in models),
        sees_whole_images=any(each.spec.sees_whole_images for each in models),
    )


def alignment_of(models: Sequence[PackedModel]) -> PackAlignment:
    """Return what packs that suit all these models must be multiples of; they have one layout."""
    layout = models[0].layout
    return PackAlignment(
        tp=layout.config.tp if layout.config.sequence_parallel else 1,
        cp=layout.config.cp,
        cp_rank=layout.cp_group.rank(),
        block=max(1 if m.config.fp8 is None else FP8_RECIPES[m.config.fp8_recipe].block for m in models),
    )
