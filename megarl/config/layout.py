"""Define the section for the parallel layout of a role: sizes of its axes, and which layers each stage has."""

import re
from dataclasses import dataclass, replace
from typing import Self

from megarl.config.setting import AT_LEAST_1, Text, setting
from megarl.errors import ConfigError
from megarl.host.device.platform import platform


def unrolled(pipeline_layout: str) -> str:
    """Return a pipeline layout without commas and repetitions, as Megatron reads it: (tt|)*2 as tt|tt|."""
    for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        pipeline_layout = re.sub(repeated, lambda found: found[1] * int(found[2]), pipeline_layout.replace(",", ""))
    return pipeline_layout


PIPELINE = Text(
    expected="a layout such as Ett|(ttt|)*2tL",
    holds=lambda text: re.fullmatch(r"E[t|]+L", unrolled(text)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutConfig:
    """Set the parallel layout of one role: world size = tp × cp × dp × pp, in Megatron's order of ranks."""

    tp: int = setting(1, AT_LEAST_1)  # Tensor-parallel size.
    pp: int = setting(1, AT_LEAST_1)  # Number of pipeline stages.
    cp: int = setting(1, AT_LEAST_1)  # Context-parallel size.
    dp: int = setting(1, AT_LEAST_1)  # Data-parallel size: number of replicas.
    # Expert-parallel size: number of the tp × cp × dp ranks of a stage over which a layer's experts are
    # distributed.
    ep: int = setting(1, AT_LEAST_1)
    etp: int = setting(1, AT_LEAST_1)  # Tensor-parallel size of each expert, independent of tp.
    sequence_parallel: bool = False  # Shard the activations of norms over the tensor-parallel ranks.
    # Model chunks per pipeline rank (interleaved 1F1B); 1 disables interleaving.
    virtual_pp: int = setting(1, AT_LEAST_1)
    # Layers of the first pipeline stage, if it has more or fewer than the others; null: an even split.
    first_stage_layers: int | None = setting(None, AT_LEAST_1)
    # Layers of the last pipeline stage, if it has more or fewer than the others; null: an even split.
    last_stage_layers: int | None = setting(None, AT_LEAST_1)
    # Layers of every model chunk, in Megatron's notation, as in Ettt|(tt|)*2tL for pp=4: t is a layer, E the embedding,
    # L the output, | ends a chunk. With virtual_pp, the first pp chunks are the first of every stage. null: an even
    # split, or one by the two settings above.
    pipeline_layout: str | None = setting(None, PIPELINE)
    # Overlap the point-to-point communication between pipeline stages with computation, which needs virtual_pp; null:
    # with it, on CUDA or if pp is 2.
    overlap_p2p: bool | None = None

    def check(self, key: str) -> None:
        """Raise ConfigError for sizes that do not divide, or that Megatron computes wrongly together."""
        if self.sequence_parallel and self.tp == 1:
            raise ConfigError(
                f"{key}.sequence_parallel: got true with tp=1, but it shards over tensor-parallel ranks; "
                f"set {key}.sequence_parallel=false or {key}.tp >= 2"
            )
        named = ("first_stage_layers", "last_stage_layers", "pipeline_layout")
        uneven = [name for name in named if getattr(self, name) is not None]
        if self.pp == 1 and (uneven or self.virtual_pp > 1):
            name = uneven[0] if uneven else "virtual_pp"
            raise ConfigError(
                f"{key}.{name}: got {getattr(self, name)} with pp=1, but there is only one stage; "
                f"remove it or set {key}.pp >= 2"
            )
        if uneven and self.virtual_pp > 1 and self.pipeline_layout is None:
            raise ConfigError(
                f"{key}.{uneven[0]}: uneven stages do not combine with virtual_pp={self.virtual_pp}; remove one of "
                f"them, or set {key}.pipeline_layout instead"
            )
        if self.pipeline_layout is not None:
            if len(uneven) > 1:
                raise ConfigError(
                    f"{key}.{uneven[0]}: is set, but {key}.pipeline_layout says it too; remove one of them"
                )
            chunks = unrolled(self.pipeline_layout).split("|")
            if len(chunks) != self.pp * self.virtual_pp or not all("t" in chunk for chunk in chunks):
                raise ConfigError(
                    f"{key}.pipeline_layout: got {self.pipeline_layout}, whose chunks have "
                    f"{', '.join(str(chunk.count('t')) for chunk in chunks)} layers, expected at least one in each of "
                    f"pp {self.pp} × virtual_pp {self.virtual_pp} = {self.pp * self.virtual_pp}; change one of them"
                )
        if self.overlap_p2p and self.pp > 1 and self.virtual_pp == 1:
            raise ConfigError(
                f"{key}.overlap_p2p: got true with virtual_pp=1, but only stages of several chunks have something to "
                f"compute meanwhile; remove it or set {key}.virtual_pp >= 2"
            )
        if self.virtual_pp > 1 and self.pp == 2 and not self.overlaps_p2p:
            raise ConfigError(
                f"{key}.virtual_pp: got {self.virtual_pp} at pp=2 without overlapped communication, which Megatron "
                f"computes silently wrong; set {key}.overlap_p2p=true"
            )
        if self.stage_size % (self.ep * self.etp):
            raise ConfigError(
                f"{key}.ep: ep {self.ep} × etp {self.etp} = {self.ep * self.etp}, expected a divisor of the "
                f"tp {self.tp} × cp {self.cp} × dp {self.dp} = {self.stage_size} ranks of a pipeline stage, over "
                f"which experts are split; change one of them"
            )

    def chunk_layers(self, num_layers: int) -> list[list[int]]:
        """Return the number of layers of every pipeline stage, for each of its model chunks."""
        if self.pipeline_layout is not None:
            chunks = [chunk.count("t") for chunk in unrolled(self.pipeline_layout).split("|")]
            return [chunks[i : i + self.pp] for i in range(0, len(chunks), self.pp)]
        named = {0: self.first_stage_layers, self.pp - 1: self.last_stage_layers}
        fixed = {stage: count for stage, count in named.items() if count is not None}
        others = self.pp - len(fixed)
        share = (num_layers - sum(fixed.values())) // others if others else 0
        counts = [fixed.get(stage, share) // self.virtual_pp for stage in range(self.pp)]
        return [counts] * self.virtual_pp

    @property
    def overlaps_p2p(self) -> bool:
        """Return whether communication between stages overlaps with computation, also where that is derived."""
        if self.overlap_p2p is None:
            return self.virtual_pp > 1 and (self.pp == 2 or platform().name == "cuda")
        return self.overlap_p2p

    @property
    def division(self) -> Self:
        """Return this layout without what divides nothing: layouts of the same shards are then equal."""
        return replace(self, overlap_p2p=None)

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def stage_size(self) -> int:
        """Return the number of ranks of a pipeline stage."""
        return self.tp * self.cp * self.dp

    @property
    def expert_dp(self) -> int:
        """Return the expert data-parallel size: how many ranks of a stage hold the same shard of the same experts."""
        return self.stage_size // (self.ep * self.etp)

    def dp_rank_of(self, rank: int) -> int:
        """Return the data-parallel coordinate of a global rank (ranks count tp fastest, then cp, dp, pp)."""
        return rank // (self.tp * self.cp) % self.dp
