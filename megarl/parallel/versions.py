"""Keep earlier versions of a model's trained weights in host memory, for losses that compare with what sampled.

The version of weights is the number of training steps that they have seen. Before the first optimizer step of step s,
the weights, of version s − 1, take the place of the oldest of `most` copies. A step that updates nothing copies
nothing, as the next copy has the same weights. Checkpoints have the copies: the samples that wait in them are of these
versions.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megarl.errors import RunError
from megarl.parallel.model import PackedModel

# The trained weights of each chunk, by name in the chunk.
Weights = list[dict[str, torch.Tensor]]


@dataclass(slots=True, kw_only=True)
class EarlierVersions:
    """Copies of the trained weights of a model on this rank, by version.

    since: the first version that is known, with all later ones; None: the next that is copied, as after a resume from a
    checkpoint without copies.
    """

    chunks: Sequence[PackedModel]
    most: int
    copies: dict[int, Weights] = field(default_factory=dict)
    since: int | None = 0

    @torch.no_grad()
    def remember(self, version: int) -> None:
        """Copy the weights as they are now, unless that was done."""
        if version in self.copies:
            return
        self.since = version if self.since is None else self.since
        values = self.empty()
        if len(self.copies) == self.most:
            oldest = min(self.copies)
            values, self.since = self.copies.pop(oldest), oldest + 1
        for mine, theirs in self._pairs(values):
            theirs.copy_(mine)
        self.copies[version] = values

    def trim(self) -> None:
        """Forget the oldest copies above `most`, as after a resume with fewer."""
        while len(self.copies) > self.most:
            self.since = (oldest := min(self.copies)) + 1
            del self.copies[oldest]

    def empty(self) -> Weights:
        """Return host memory for a copy."""
        found: list[dict[str, torch.nn.Parameter]] = [_trained(chunk) for chunk in self.chunks]
        return [{name: torch.empty_like(each, device="cpu") for name, each in named.items()} for named in found]

    def place_of(self, version: int) -> int | None:
        """Return the number of the copy that has a version's weights; None: they are those of the model itself.

        Raises RunError if none has them.
        """
        if self.since is None or version < self.since:
            raise RunError(
                f"a token was sampled by version {version} of the weights, but ranks keep versions from "
                f"{self.since} on; raise algo.policy_loss.kept_versions, or set compared_with=engine and "
                "rollout.head_tokens"
            )
        return min((number for number in self.copies if number >= version), default=None)

    @contextlib.contextmanager
    def computing_with(self, number: int) -> Iterator[None]:
        """Within this context, the model has the weights of a copy, which meanwhile has those of the model."""
        self._exchange(number)
        try:
            yield
        finally:
            self._exchange(number)

    @torch.no_grad()
    def _exchange(self, number: int) -> None:
        for mine, theirs in self._pairs(self.copies[number]):
            now = mine.detach().to("cpu", copy=True)
            mine.copy_(theirs)
            theirs.copy_(now)

    def _pairs(self, values: Weights) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        for chunk, copied in zip(self.chunks, values, strict=True):
            named: Mapping[str, torch.nn.Parameter] = _trained(chunk)
            yield from ((named[name], value) for name, value in copied.items())


def _trained(chunk: PackedModel) -> dict[str, torch.nn.Parameter]:
    return {name: each for name, each in chunk.named_parameters() if each.requires_grad}
