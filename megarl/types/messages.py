"""Define the messages between the driver and the trainer's ranks, without megatron: the driver unpickles them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from megarl.config.schema import ActorConfig, LayoutConfig, ModelConfig
from megarl.types import AlgoState, Denominators, FloatArray, Objective


class Role(StrEnum):
    """A role says what a model is for."""

    ACTOR = "actor"
    REFERENCE = "reference"
    CRITIC = "critic"
    REWARD = "reward_model"


class Head(StrEnum):
    """A head is what a model's last layer outputs per token: log-probs over the vocabulary, or one value."""

    LM = "lm"
    SCALAR = "scalar"


class Part(StrEnum):
    """A part is the kind of a role's memory that moves between device and host independently of the others."""

    PARAMS = "params"
    GRADS = "grads"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSpec:
    """A role spec describes a model of the run; if not `trainable`, it has neither gradient buffers nor an optimizer.

    settings: its layout and training, in the actor's config class whatever the role.
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
        """Return whether tokens go to the experts that the rollout engine recorded; only the actor can replay them."""
        return self.role is Role.ACTOR and self.settings.moe.replay_routing


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """A load request lists the models of a run; a group of ranks is asked only for those with its layout."""

    roles: tuple[RoleSpec, ...]
    seed: int
    deterministic: bool = False


@dataclass(frozen=True, slots=True)
class MicroBatchPlan:
    """A plan assigns a batch's rows to data-parallel ranks and micro-batches: `ranks[dp][micro_batch]` lists indices.

    All ranks have the same number of micro-batches."""

    ranks: Sequence[Sequence[Sequence[int]]]

    def paired(self, offset: int) -> "MicroBatchPlan":
        """Return the plan for a batch of twice as many rows: each micro-batch also gets the rows at its indices +
        `offset`.
        """
        return MicroBatchPlan(
            [[[*indices, *(offset + i for i in indices)] for indices in batches] for batches in self.ranks]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """A score request asks for one scoring pass of one role, with log-probs and entropies at `temperature`.

    paired: the second half of each micro-batch repeats the first with other prompts, and the KL between the two is
    computed as well."""

    role: Role
    step: int
    temperature: float = 1.0
    paired: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RowScores:
    """Row scores are per-token float32 results of a scoring pass for some rows, 0 outside the loss mask.

    scores: name (`logprobs` and `entropy`, `values` of a scalar head, or `kl` of pairs) → index in the batch → [R].
    """

    scores: Mapping[str, Mapping[int, FloatArray]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreResult:
    """A store result holds elements written per Hugging Face tensor, and position-weighted checksums if requested."""

    num_elements: Mapping[str, int]
    checksums: Mapping[str, int]

    def merged(self, other: "StoreResult") -> "StoreResult":
        """Return the sums over what two ranks wrote to the model's files."""
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
    """An update request asks for one optimizer step of one role."""

    role: Role = Role.ACTOR
    step: int
    objective: Objective[Any]
    state: AlgoState
    denominators: Denominators
    temperature: float
    lr: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """An update result holds the metrics of the whole mini-batch, and the role's outputs from before the step.

    before: a policy's log-probs or a critic's values, by index of the row."""

    metrics: Mapping[str, float]
    before: Mapping[int, FloatArray]
