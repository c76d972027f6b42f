"""Name the tensors of a forward pass that engine and trainer both have, in the order in which they are computed."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import torch

from megarl.types.arrays import IdArray


class Probe(StrEnum):
    """A tensor of a forward pass, in words."""

    EMBEDDING = "embedding"
    ATTENTION_INPUT = "input of attention"
    QUERY = "queries"
    KEY = "keys"
    VALUE = "values"
    QUERY_NORMED = "norm of queries"
    KEY_NORMED = "norm of keys"
    QUERY_TURNED = "rotary positions of queries"
    KEY_TURNED = "rotary positions of keys"
    ATTENDED = "attention"
    ATTENTION_OUTPUT = "output projection of attention"
    STREAM = "residual stream after attention"
    MLP_INPUT = "input of the MLP"
    MLP_HIDDEN = "gate and up of the MLP"
    MLP_OUTPUT = "output of the MLP"
    OUTPUT = "output of the layer"
    FINAL_NORM = "final norm"
    LOGPROBS = "log-probs"
    SAMPLED = "log-probs of sampled tokens"


_ENDS = (Probe.FINAL_NORM, Probe.LOGPROBS, Probe.SAMPLED)
_OF_HEADS = (*(Probe.QUERY, Probe.KEY, Probe.VALUE), *(Probe.QUERY_NORMED, Probe.KEY_NORMED))
_OF_LAYERS = tuple(stage for stage in Probe if stage not in (Probe.EMBEDDING, *_ENDS))
# [tokens, heads, head size]; tensor-parallel ranks have some of the heads, or columns of the latter.
OF_HEADS = (*_OF_HEADS, Probe.QUERY_TURNED, Probe.KEY_TURNED, Probe.ATTENDED)
OF_COLUMNS = (Probe.MLP_HIDDEN,)


@dataclass(frozen=True, slots=True)
class PassPlace:
    """A tensor of a pass: its stage, and its layer if it is part of one."""

    stage: Probe
    layer: int | None = None

    def __str__(self) -> str:
        return str(self.stage) if self.layer is None else f"layer {self.layer}, {self.stage}"


def places(num_layers: int) -> Iterator[PassPlace]:
    """Yield all places of a model in the order of computation.

    >>> next(places(2)).stage.name
    'EMBEDDING'
    """
    yield PassPlace(Probe.EMBEDDING)
    yield from (PassPlace(stage, layer) for layer in range(num_layers) for stage in _OF_LAYERS)
    yield from map(PassPlace, _ENDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedPass:
    """The tensors that one side computed for a row of T tokens: in float32, by place, with T as their first dimension.

    temperature: that of its log-probs [T − 1]. sampled: the engine's log-probs of the last tokens when it sampled them,
    at `sampled_at`.
    """

    token_ids: IdArray
    values: Mapping[PassPlace, torch.Tensor]
    temperature: float = 1.0
    sampled_at: float = 1.0


@dataclass(slots=True)
class PassRecorder:
    """A recorder of what hooks see in one process, chunk by chunk of the tokens."""

    parts: dict[PassPlace, list[torch.Tensor]] = field(default_factory=dict)

    def record(self, stage: Probe, layer: int | None, value: torch.Tensor, head_dim: int | None = None) -> None:
        """Keep a copy of a value [T, …] before anything overwrites it: [T, heads, head_dim] if `head_dim` is given."""
        copy = value.detach().to("cpu", torch.float32, copy=True)
        copy = copy.reshape(len(copy), *((-1, head_dim) if head_dim else copy.shape[1:]))
        self.parts.setdefault(PassPlace(stage, layer), []).append(copy)

    def values(self) -> dict[PassPlace, torch.Tensor]:
        return {place: torch.cat(parts) for place, parts in self.parts.items()}


def merged(
    parts: Iterable[Mapping[PassPlace, torch.Tensor]], *, num_heads: int, num_kv_heads: int, num_tokens: int
) -> dict[PassPlace, torch.Tensor]:
    """Put together what the ranks of a pass recorded, in their order; each has some of the heads, or of the layers.

    >>> place = PassPlace(Probe.OUTPUT, 0)
    >>> merged([{place: torch.zeros(3, 4)}], num_heads=1, num_kv_heads=1, num_tokens=2)[place].shape
    torch.Size([2, 4])
    """
    found: dict[PassPlace, list[torch.Tensor]] = {}
    for part in parts:
        for place, value in part.items():
            found.setdefault(place, []).append(value[:num_tokens])
    values: dict[PassPlace, torch.Tensor] = {}
    for place, several in found.items():
        values[place] = several[0]
        if place.stage in OF_HEADS:
            heads = torch.cat(several, 1)
            is_query = place.stage in (
                Probe.QUERY,
                Probe.QUERY_NORMED,
                Probe.QUERY_TURNED,
                Probe.ATTENDED,
            )
            # Where ranks repeat heads, the first copy of each counts.
            values[place] = heads[:, :: heads.shape[1] // (num_heads if is_query else num_kv_heads)]
        elif place.stage in OF_COLUMNS:
            values[place] = torch.cat(several, 1)
    return values
