"""Define the plan of a run as data; sizes are in bytes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megarl.config.derived import Derived
from megarl.sync.plan.build import PlanStatistics
from megarl.sync.plan.links import LinkStatistics

if TYPE_CHECKING:
    from megarl.sync.transport.transports import Staging


@dataclass(frozen=True, slots=True, kw_only=True)
class RolePlan:
    """One model of a run. `num_parameters` counts the whole model, without vocabulary padding.

    num_expert_parameters: how many of the parameters belong to experts. update_rate, kept_versions: as in `RoleSpec`.
    """

    name: str
    model_path: str
    model_config: str
    family: str
    trainable: bool
    num_parameters: int
    num_expert_parameters: int
    update_rate: float | None = None
    kept_versions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutPlan:
    """The processes of one layout (rank i uses device i), their roles, and each group's ranks, by axis."""

    roles: tuple[str, ...]
    num_ranks: int
    layout: dict[str, object]
    groups: dict[str, tuple[tuple[int, ...], ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPlan:
    """The work of a role before the update of a step (log-probs or values of all rows), if every row has full length.

    rows, max_row_tokens: by kind of row: `plain`, `hinted` (with the prompt's hint) and `shuffled` (with another
    prompt's). micro_batches: of one replica. seconds_at_peak: a lower bound of the pass's time, namely its FLOPs at the
    peak of all devices; None if the peak is not known.
    """

    role: str
    rows: dict[str, int]
    max_row_tokens: dict[str, int]
    micro_batches: int
    tokens: int
    flops: int
    seconds_at_peak: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The batch sizes of a step, and the log-probs and values that are computed before its update (`forward`).

    Micro-batches are those of one optimizer step on one replica if every row has full length.
    """

    rows_per_step: int
    rows_per_optimizer_step: int
    optimizer_steps_per_step: int
    optimizer_steps: int
    max_row_tokens: int
    micro_batch_tokens: int
    micro_batches_at_full_length: int
    forward: tuple[ForwardPlan, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """The memory of a role on each rank of a pipeline stage; all ranks of a stage hold equally much.

    resident: bytes by part that a rank holds between passes if nothing is offloaded. activations, head: what the role's
    update adds; 0 if it is frozen. forward: what a pass without gradients adds. num_experts: how many experts of each
    MoE layer a rank holds; num_expert_parameters: their parameters. num_parameters: those without adapters;
    num_trained_*: those that have gradients, which may be adapters', or that follow such. on_host: bytes of the
    optimizer's state, of gradients for it, and of earlier versions of the weights, that stay on the host.
    """

    role: str
    stage: int
    ranks: tuple[int, ...]
    num_layers: int
    num_parameters: int
    num_expert_parameters: int
    num_experts: int
    num_trained_parameters: int
    num_trained_expert_parameters: int
    resident: dict[str, int]
    activations: int
    head: int
    forward: int
    on_host: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePlan:
    """The bytes on one device during a phase: what the ranks keep, what a pass adds, what an engine holds."""

    trainer: int
    activations: int
    engine: int

    @property
    def total(self) -> int:
        return self.trainer + self.activations + self.engine


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    """Devices that hold the same shards, of all layouts together; `phases` are the phases of a step on each of them.

    Devices are numbered like the actor's ranks. `resident`: bytes of all shards on one device; `offloaded`: those of
    them that the host keeps while engines generate, which are all but gradients; `on_host`: bytes that it always keeps.
    """

    devices: tuple[int, ...]
    resident: int
    offloaded: int
    phases: dict[str, PhasePlan]
    on_host: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """The vLLM engines, with bytes per device, of the pipeline stage that takes most; `kv_cache` is None if vLLM itself
    decides how much memory it takes. full_rows: the rows of full length that an engine's cache holds, if that is known.
    """

    num_engines: int
    tp: int
    pp: int
    nodes_per_engine: int
    shares_devices: bool
    weights: int
    kv_cache: int | None
    kv_bytes_per_token: int
    full_rows: int | None
    max_num_seqs: int

    @property
    def layout(self) -> str:
        """Their number and parallel sizes, as in `16 × tp 8 × pp 4`."""
        return f"{self.num_engines} × tp {self.tp}" + (f" × pp {self.pp}" if self.pp > 1 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """The processes and devices of one node.

    offloaded: bytes of host memory that its trainer ranks need while engines generate, what always stays there of their
    optimizers, and the weights that engines keep there while they sleep. checkpoint, portable_checkpoint: what ranks
    need in addition while a checkpoint is being written. judge_servers: the replicas of each entry of
    `rewards.judge_servers`. environments: the environment workers, with `environment.nodes`.
    """

    ranks: tuple[int, ...]
    engines: tuple[int, ...]
    offloaded: int
    checkpoint: int
    portable_checkpoint: int
    judge_servers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    environments: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """All that `train --dry-run` reports. The actor's layout comes first; nodes with engines only come last.

    links: the estimated time of a weight sync between GPUs; None on a CPU. staging: the most that a process allocates
    for messages of a weight sync. derived: what the run uses for settings that are null. warnings: what it would warn
    about. missing: models and data that are absent, so that nothing can be said about the data. hints: how many prompts
    there are, how many have a hint (`placed`), how many hints are cut, and how many are missing, by reason; empty
    without hints or data. seconds: the forecast of a step by phase; empty on a CPU.
    """

    run: str
    roles: tuple[RolePlan, ...]
    layouts: tuple[LayoutPlan, ...]
    nodes: tuple[NodePlan, ...]
    steps: StepPlan
    shards: tuple[ShardPlan, ...]
    devices: tuple[DevicePlan, ...]
    engine: EnginePlan
    sync_bytes: int
    bridge: PlanStatistics
    links: LinkStatistics | None
    staging: "Staging"
    device_bytes: int | None
    derived: tuple[Derived, ...]
    warnings: tuple[str, ...]
    missing: tuple[str, ...]
    hints: dict[str, int]
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedPlan:
    """All that `--dry-run` reports of a supervised run; sizes are in bytes.

    data: by set (train, val), the numbers that `count_examples` returns. epochs: passes over the training examples.
    micro_batches: the largest number that one replica can have in a step.
    """

    run: str
    command: str
    roles: tuple[RolePlan, ...]
    layout: dict[str, object]
    num_ranks: int
    data: dict[str, dict[str, int]]
    total_steps: int
    batch_size: int
    epochs: float
    micro_batches: int
    shards: tuple[ShardPlan, ...]
    notes: tuple[str, ...]
    derived: tuple[Derived, ...]
    warnings: tuple[str, ...]
