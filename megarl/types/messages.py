"""What the driver and the trainer's ranks say to each other. Imports no megatron: the driver unpickles these."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from megarl.config.schema import ActorConfig, LayoutConfig, ModelConfig
from megarl.types import AlgoState, Denominators, FloatArray, Objective


class Role(StrEnum):
    """What a model is for."""

    ACTOR = "actor"
    REFERENCE = "reference"
    CRITIC = "critic"
    REWARD = "reward_model"


class Head(StrEnum):
    """What a model's last layer answers per token: log-probs over the vocabulary, or one value."""

    LM = "lm"
    SCALAR = "scalar"


class Part(StrEnum):
    """What of a role's memory moves between device and host on its own."""

    PARAMS = "params"
    GRADS = "grads"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSpec:
    """A model of the run. One without `trainable` gets neither gradient buffers nor an optimizer.

    settings: its layout and training, in the actor's terms whatever the role.
    """

    role: Role
    model: ModelConfig
    settings: ActorConfig
    head: Head = Head.LM
    trainable: bool = True

    @property
    def layout(self) -> LayoutConfig:
        return self.settings.layout

    @property
    def replays_routing(self) -> bool:
        """Whether its tokens go to the experts that the rollout recorded: those of the policy that sampled it."""
        return self.role is Role.ACTOR and self.settings.moe.replay_routing


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """The models of a run; a group of ranks is asked for those of its layout."""

    roles: tuple[RoleSpec, ...]
    seed: int
    deterministic: bool = False


@dataclass(frozen=True, slots=True)
class MicroBatchPlan:
    """Which rows of a batch each data-parallel rank processes, in micro-batches: `ranks[dp][micro_batch]` lists row
    indices. All ranks have the same number of micro-batches.
    """

    ranks: Sequence[Sequence[Sequence[int]]]

    def paired(self, offset: int) -> "MicroBatchPlan":
        """The plan of a batch twice as long: each micro-batch also gets the rows `offset` further on, in its order."""
        return MicroBatchPlan(
            [[[*indices, *(offset + i for i in indices)] for indices in batches] for batches in self.ranks]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """One scoring pass of one role. Log-probs and entropies are those at `temperature`.

    paired: the second half of each micro-batch repeats the first with other prompts; the KL between the two is scored
    as well.
    """

    role: Role
    step: int
    temperature: float = 1.0
    paired: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RowScores:
    """Per-token float32 results of some rows, 0 outside the loss mask.

    scores: `logprobs` and `entropy`, `values` for a scalar head, or `kl` of pairs → index in the batch → [R].
    """

    scores: Mapping[str, Mapping[int, FloatArray]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreResult:
    """What was written of each Hugging Face tensor: elements, and (if asked for) position-weighted checksums."""

    num_elements: Mapping[str, int]
    checksums: Mapping[str, int]

    def merged(self, other: "StoreResult") -> "StoreResult":
        """Add up what two ranks wrote."""
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
    """One optimizer step of one role."""

    role: Role = Role.ACTOR
    step: int
    objective: Objective[Any]
    state: AlgoState
    denominators: Denominators
    temperature: float
    lr: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """Metrics of the whole mini-batch, and what the role said of its rows before the step, by index: log-probs of
    a policy, values of a critic."""

    metrics: Mapping[str, float]
    before: Mapping[int, FloatArray]
