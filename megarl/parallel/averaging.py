"""Keep the exponential moving average of a model's weights, for another role: a teacher that follows the policy.

After each optimizer step, average ← average + rate·(weights − average), on every rank for the shards that it holds.
The average is in float32: bfloat16 has 8 bits, and would round most steps of a small rate away. A model in bfloat16
computes with the average rounded to it; a float32 model's weights are the average themselves.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megarl.host.device.platform import platform
from megarl.parallel.building import named_shards, rank_slices
from megarl.parallel.model import PackedModel
from megarl.weights.families import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class MovingAverage:
    """The moving average of the weights, or of the adapters alone, of a model that is split as `chunks` are.

    chunks: the model that computes with it. values: by chunk and name in the chunk. spec: describes the weights, or the
    adapters.
    """

    rate: float
    chunks: Sequence[PackedModel]
    values: Sequence[Mapping[str, torch.Tensor]]
    spec: ModelSpec
    of_adapters: bool

    @classmethod
    def of(cls, chunks: Sequence[PackedModel], rate: float, adapters: ModelSpec | None) -> "MovingAverage":
        """Return the average that begins as the weights that the model has now. adapters: describes those averaged."""
        of_adapters = adapters is not None
        values = [
            {name: parameter.data.float() for _, name, parameter in _parameters(chunk, of_adapters=of_adapters)}
            for chunk in chunks
        ]
        return cls(rate=rate, chunks=chunks, values=values, spec=adapters or chunks[0].spec, of_adapters=of_adapters)

    @torch.no_grad()
    def follow(self, followed: Sequence[PackedModel]) -> None:
        """Move the average towards the weights of another model, which is split over ranks alike."""
        for values, chunk in zip(self.values, followed, strict=True):
            weights = dict(chunk.named_parameters())
            for name, value in values.items():
                # Exact where both are equal, and at rate 1.
                value.lerp_(weights[name].float(), self.rate)
        self.write()

    @torch.no_grad()
    def write(self) -> None:
        """Set the weights of the model that computes with the average."""
        for values, chunk in zip(self.values, self.chunks, strict=True):
            for name, parameter in chunk.named_parameters():
                # In float32 it is the average.
                if name in values and parameter.dtype != values[name].dtype:
                    parameter.copy_(values[name])

    @torch.no_grad()
    def distance(self, followed: Sequence[PackedModel]) -> float:
        """Return ‖weights − average‖ / ‖weights‖ of the model that is followed, over all ranks."""

        def shards(*, apart: bool) -> Iterator[tuple[str, torch.Tensor]]:
            for values, chunk in zip(self.values, followed, strict=True):
                for name, local_name, weight in _parameters(chunk, of_adapters=self.of_adapters):
                    yield name, weight.float() - values[local_name] if apart else weight.data

        squares = torch.stack([self._squares(shards(apart=True)), self._squares(shards(apart=False))])
        dist.all_reduce(squares)
        apart, whole = squares.sqrt().tolist()
        return apart / whole if whole else 0.0

    def _squares(self, shards: Iterable[tuple[str, torch.Tensor]]) -> torch.Tensor:
        """Sum the squares of those elements that this rank owns."""
        parts = rank_slices(shards, self.spec, self.chunks[0].layout)
        norms = [torch.linalg.vector_norm(part.view, dtype=torch.float64) for part in parts if part.owned]
        return torch.stack([torch.zeros((), dtype=torch.float64, device=platform().device()), *norms]).square().sum()


def _parameters(chunk: PackedModel, *, of_adapters: bool) -> Iterator[tuple[str, str, torch.nn.Parameter]]:
    """Yield what `named_shards` does, but no router biases, which nothing trains."""
    return (each for each in named_shards(chunk, of_adapters=of_adapters) if isinstance(each[2], torch.nn.Parameter))
