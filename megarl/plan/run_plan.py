"""What a plan says; sizes are in bytes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RolePlan:
    """A model of the run; `num_parameters` is the whole model's, without vocabulary padding."""

    name: str
    model_path: str
    family: str
    trainable: bool
    num_parameters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Batch arithmetic. Micro-batches are those of one optimizer step on one replica if every row has full length."""

    rows_per_step: int
    rows_per_optimizer_step: int
    optimizer_steps_per_step: int
    optimizer_steps: int
    max_row_tokens: int
    micro_batch_tokens: int
    micro_batches_at_full_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePlan:
    """Bytes on one device during a phase: what the trainer rank keeps, what its pass adds, what an engine holds."""

    trainer: int
    activations: int
    engine: int

    @property
    def total(self) -> int:
        return self.trainer + self.activations + self.engine


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """The ranks of a pipeline stage: all hold equally much.

    `resident` holds what lies on a rank between passes if nothing is offloaded; `activations` and `head` are those of
    the actor's update; `phases` are those of a step.
    """

    stage: int
    ranks: tuple[int, ...]
    num_layers: int
    num_parameters: int
    resident: dict[str, int]
    activations: int
    head: int
    phases: dict[str, PhasePlan]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """The vLLM engines. Bytes are those of one device; `kv_cache` is None where vLLM will measure what it can take."""

    num_engines: int
    tp: int
    shares_devices: bool
    weights: int
    kv_cache: int | None
    kv_bytes_per_token: int

    @property
    def total(self) -> int:
        return self.weights + (self.kv_cache or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """What runs on a node. `offloaded`: bytes of host memory that its trainer ranks need while engines generate."""

    ranks: tuple[int, ...]
    engines: tuple[int, ...]
    offloaded: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """Everything that `train --dry-run` reports."""

    run: str
    model_config: str
    layout: dict[str, object]
    nodes: tuple[NodePlan, ...]
    groups: dict[str, tuple[tuple[int, ...], ...]]
    roles: tuple[RolePlan, ...]
    steps: StepPlan
    stages: tuple[StagePlan, ...]
    engine: EnginePlan
    sync_bytes: int
    device_bytes: int | None
