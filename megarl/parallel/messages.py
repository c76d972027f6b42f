"""What the driver and the trainer's ranks say to each other. Imports no megatron: the driver unpickles these."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from megarl.config.schema import ActorConfig, ModelConfig
from megarl.types import Algorithm, AlgoState, Denominators, FloatArray

Role: TypeAlias = Literal["actor", "reference"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """The models of a run: the actor with its optimizer, and a frozen reference if the algorithm reads one."""

    model: ModelConfig
    actor: ActorConfig
    with_reference: bool
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowScores:
    """Per-token float32 results of some rows: index in the batch → [R] arrays, 0 outside the loss mask."""

    logprobs: Mapping[int, FloatArray]
    entropy: Mapping[int, FloatArray]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreResult:
    """What was written of each Hugging Face tensor: elements, and (if asked for) position-weighted checksums."""

    num_elements: Mapping[str, int]
    checksums: Mapping[str, int]

    def merged(self, other: "StoreResult") -> "StoreResult":
        """What two ranks wrote together."""
        names = self.num_elements.keys() | other.num_elements.keys()
        return StoreResult(
            num_elements={n: self.num_elements.get(n, 0) + other.num_elements.get(n, 0) for n in names},
            checksums={
                n: (self.checksums.get(n, 0) + other.checksums.get(n, 0)) % (1 << 64)
                for n in self.checksums.keys() | other.checksums.keys()
            },
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRequest:
    """One optimizer step."""

    step: int
    algorithm: Algorithm
    state: AlgoState
    denominators: Denominators
    temperature: float
    lr: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """Metrics of the whole mini-batch, and the log-probs that its rows had before the step, by index."""

    metrics: Mapping[str, float]
    logprobs: Mapping[int, FloatArray]
