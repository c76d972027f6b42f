"""Define the messages between the driver and the trainer's ranks. The driver unpickles them without megatron."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from megarl.config.plugins import Plugin, active_plugins
from megarl.config.schema import ActorConfig, LayoutConfig, ModelConfig, RunConfig
from megarl.config.vision import TowerPart
from megarl.types import FloatArray

if TYPE_CHECKING:
    from megarl.types import AlgoState, Denominators, Objective
    from megarl.types.objectives import HeadMeasure


class Role(StrEnum):
    """The purpose of a model in a run: policy, reference, teacher, critic or reward model.

    Further teachers have roles of their own, which are called as their sections of the configuration: teachers.NAME.
    """

    ACTOR = "actor"
    REFERENCE = "reference"
    TEACHER = "teacher"
    CRITIC = "critic"
    REWARD = "reward_model"

    @classmethod
    def _missing_(cls, value: object) -> "Role | None":
        if not (isinstance(value, str) and value.startswith("teachers.")):
            return None
        member = str.__new__(cls, value)
        member._name_, member._value_ = value, value
        return cls._value2member_map_.setdefault(value, member)  # type: ignore[return-value]

    @property
    def kind(self) -> "Role":
        """Return the role itself, or TEACHER for every teacher."""
        return Role.TEACHER if self.value.startswith("teachers.") else self


class Head(StrEnum):
    """The output of a model's last layer per token: log-probs over the vocabulary, or a single value."""

    LM = "lm"
    SCALAR = "scalar"


class Part(StrEnum):
    """A kind of a role's memory; each kind moves between device and host independently of the others."""

    PARAMS = "params"
    GRADS = "grads"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Vision:
    """How a model reads images. store: the directory that has them by digest. train: what is trained of its tower."""

    store: str
    train: TowerPart = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSpec:
    """A model of the run and its role. If it is not `trainable`, it has neither gradient buffers nor an optimizer.

    settings: parallel layout and training; for every role they have the config class of the actor. base_of: the role
    whose frozen weights are this one's, too. With adapters, this one has memory for these alone; without, it has none,
    and the other's are switched off when it computes. in_update_of: the role in whose update this one computes too,
    instead of a pass of its own. update_rate: by which share of the way its weights, or its adapters alone, move to the
    actor's after each of the actor's optimizer steps; None: they stay. update_every: they move in the steps whose
    number it divides. vision: None: the model reads texts alone. kept_versions: how many earlier versions of its
    weights ranks keep on the host.
    """

    role: Role
    model: ModelConfig
    settings: ActorConfig
    head: Head = Head.LM
    trainable: bool = True
    base_of: Role | None = None
    in_update_of: Role | None = None
    update_rate: float | None = None
    update_every: int = 1
    vision: Vision | None = None
    kept_versions: int = 0

    @property
    def changes(self) -> bool:
        """Return whether the weights change in a run, so that checkpoints have them."""
        return self.trainable or self.update_rate is not None

    def is_beside(self, role: Role) -> bool:
        """Return whether another role's update needs this one's weights, to compute with them or to move them."""
        return self.in_update_of is role or (self.update_rate is not None and role is Role.ACTOR)

    @property
    def has_memory(self) -> bool:
        """Return whether the model has memory of its own: for all weights, or for adapters."""
        return self.base_of is None or self.settings.lora is not None

    @property
    def memory(self) -> tuple[Role, ...]:
        """Return the roles in whose memory the model is, first its own."""
        own = (self.role,) if self.has_memory else ()
        return own if self.base_of is None else (*own, self.base_of)

    @property
    def layout(self) -> LayoutConfig:
        return self.settings.layout

    @property
    def tower(self) -> TowerPart | None:
        """Return what is trained of the model's vision tower; None: it reads texts alone."""
        return None if self.vision is None else self.vision.train

    @property
    def replays_routing(self) -> bool:
        """Return whether the model sends tokens to the experts that the rollout engine recorded; only the actor can."""
        return self.role is Role.ACTOR and self.settings.moe.replay_routing


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """A request to load the models of a run; a group of ranks gets only the models that have the group's layout.

    plugins: what registers the parts of users that the ranks will be asked for.
    """

    roles: tuple[RoleSpec, ...]
    plugins: tuple[Plugin, ...] = ()
    seed: int
    deterministic: bool = False
    batch_invariant: bool = False
    suspends_nccl: bool = False

    @classmethod
    def of(cls, run: RunConfig, roles: Sequence[RoleSpec], *, suspends_nccl: bool = False) -> "LoadRequest":
        """Return the request of a run's settings, with the plugins of this process."""
        return cls(
            roles=tuple(roles),
            plugins=active_plugins(),
            seed=run.seed,
            deterministic=run.deterministic,
            batch_invariant=run.batch_invariant,
            suspends_nccl=suspends_nccl,
        )


@dataclass(frozen=True, slots=True)
class MicroBatchPlan:
    """A plan that assigns rows, by index, to data-parallel ranks and micro-batches: `ranks[dp][micro_batch]`.
    All ranks have the same number of micro-batches.
    """

    ranks: Sequence[Sequence[Sequence[int]]]

    def paired(self, offset: int) -> "MicroBatchPlan":
        """Return the plan for twice as many rows: a micro-batch's rows also come with `offset` added to them."""
        return MicroBatchPlan(
            [[[*indices, *(offset + i for i in indices)] for indices in batches] for batches in self.ranks]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Teaching:
    """The comparison of the actor in an update, over the vocabulary, with a teacher or the engine that sampled.

    role: the teacher whose hidden states the update computes; None: rows have its likeliest tokens, or the engine's.
    kept: the number under which ranks kept the actor's own before the step's first update. measure: what is computed
    beside these, or the engine; None: a teacher's divergence. divergence, beta: as in `algo.distill`. common: ids below
    this are the same for both; None: all are. reads_hints: whether the teacher, perhaps the actor itself, reads hints.
    """

    role: Role | None = None
    divergence: str = "reverse"
    beta: float = 0.5
    kept: int | None = None
    measure: "HeadMeasure | None" = None
    common: int | None = None
    reads_hints: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardRequest:
    """A request for one forward pass of a role over a batch; log-probs and entropies are taken at `temperature`.
    top_k: also find that many of the likeliest tokens at each place, and their log-probs.
    common: distributions are over this many first tokens of the vocabulary; None: over all.
    paired: each micro-batch holds rows, then the same responses after other prompts; the pass also computes, per
    response token, KL(policy after the other prompt ‖ policy after the row's own). squares: also compute Σ p². keeps:
    only keep hidden states, under this number (see `Teaching`); those of tokens with these `lags` by the earlier
    versions of the weights.
    """

    role: Role
    step: int
    temperature: float = 1.0
    paired: bool = False
    top_k: int | None = None
    common: int | None = None
    squares: bool = False
    keeps: int | None = None
    lags: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardResult:
    """The per-token results of a forward pass for some rows, float32 and 0 outside the loss mask.

    quantities: name (`logprobs` and `entropy`, `values` of a scalar head, or `kl` of pairs) → row index in the batch →
    [R]; those of the likeliest tokens, `top_ids` and `top_logprobs`, are [R, k].
    """

    quantities: Mapping[str, Mapping[int, FloatArray]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreResult:
    """Parts of Hugging Face tensors that a rank wrote: elements and, if requested, position-weighted checksums."""

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
class AccumulateRequest:
    """A request to add the gradient of an objective on some rows to those that a role's next optimizer step takes.

    The gradient is that of Σ sums / denominators, see `LossSums`. with_outputs: return the model's outputs, too.
    teaching: with which teacher the model is compared in the loss; None: with none.
    """

    role: Role = Role.ACTOR
    step: int
    objective: "Objective[Any]"
    state: "AlgoState"
    denominators: "Denominators"
    temperature: float
    with_outputs: bool = True
    teaching: Teaching | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRequest:
    """A request for one optimizer step of a role, with the gradients that were accumulated for it.

    scale: a factor of the gradients before they are clipped. betas, clip: None for those of the role's settings.
    watches: look whether the step moves weights. measures: return how far it moves those of each layer.
    """

    role: Role = Role.ACTOR
    step: int
    lr: float
    scale: float = 1.0
    betas: tuple[float, float] | None = None
    clip: float | None = None
    watches: bool = False
    measures: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRequest(AccumulateRequest):
    """A request to accumulate the gradient on a mini-batch, and to take an optimizer step at once."""

    lr: float
    watches: bool = False
    measures: bool = False

    @property
    def optimizer_step(self) -> StepRequest:
        """Return the second half of the request."""
        watches, measures = self.watches, self.measures
        return StepRequest(role=self.role, step=self.step, lr=self.lr, watches=watches, measures=measures)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """The metrics of the rows of one request over all ranks, and the model's outputs from before the optimizer step.
    before: a policy's log-probs or a critic's values, by index of the row, if they were asked for. divergences: those
    of each token from a teacher in the loss, likewise. num_watched, num_moved: how many weights were looked at, and how
    many of them the optimizer step changed.
    """

    metrics: Mapping[str, float]
    before: Mapping[int, FloatArray]
    divergences: Mapping[int, FloatArray] = field(default_factory=dict)
    num_watched: int = 0
    num_moved: int = 0

    @classmethod
    def merged(cls, results: Sequence["UpdateResult | None"]) -> "UpdateResult":
        """Return the result of all replicas, given what each rank returned; only those that report returned one."""
        reported = [result for result in results if result is not None]
        return cls(
            metrics=reported[0].metrics,
            before={i: a for r in reported for i, a in r.before.items()},
            divergences={i: a for r in reported for i, a in r.divergences.items()},
            num_watched=sum(r.num_watched for r in reported),
            num_moved=sum(r.num_moved for r in reported),
        )
