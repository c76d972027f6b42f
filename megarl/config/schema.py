"""The configuration tree. Every key that a user can set is a field here or in the modules imported here."""

from dataclasses import dataclass, field
from typing import Literal

from megarl.config.algo import AlgoConfig
from megarl.config.generation import (
    EngineConfig,
    NodesConfig,
    PlacementConfig,
    RolloutConfig,
    SyncConfig,
    ValidationConfig,
)
from megarl.config.models import (
    ActorConfig,
    CriticConfig,
    CriticOptimizerConfig,
    HeadConfig,
    LayoutConfig,
    ModelConfig,
    MoeConfig,
    OptimizerConfig,
    ReferenceConfig,
    RewardModelConfig,
)
from megarl.config.rewards import RewardsConfig
from megarl.config.setting import AT_LEAST_0, AT_LEAST_1, POSITIVE, Range, section, setting

__all__ = [
    "ActorConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "CriticConfig",
    "CriticOptimizerConfig",
    "DataConfig",
    "EngineConfig",
    "HeadConfig",
    "LayoutConfig",
    "LoggingConfig",
    "ModelConfig",
    "MoeConfig",
    "NodesConfig",
    "OptimizerConfig",
    "PlacementConfig",
    "ReferenceConfig",
    "RewardModelConfig",
    "RolloutConfig",
    "RunConfig",
    "SftConfig",
    "SyncConfig",
    "TrainRewardConfig",
    "TrainerConfig",
    "ValidationConfig",
    "WeightedFile",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Where the run writes, and the seed everything random derives from."""

    name: str = "run"  # The run's directory is RUN = dir/name.
    dir: str = "runs"  # Where runs go.
    seed: int = setting(0, AT_LEAST_0)  # All randomness derives from it.
    # Same numbers on every run, resumed or not: no prefix cache in the engine, torch's deterministic algorithms.
    deterministic: bool = setting(False, affects=("workers",))


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedFile:
    """A prompt file of a mixture; batches hold its prompts in proportion to its weight among the files' weights."""

    path: str  # Parquet or JSONL.
    # > 0, relative to the other files' weights.
    weight: float = setting(1.0, Range(expected="> 0; leave the file out instead", above=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Prompt files (parquet or JSONL) for training and validation."""

    # Paths alone are one data set, end to end. One entry {path: ..., weight: 2.0} makes it a mixture by weight, in
    # which a path alone weighs 1.
    train: tuple[str | WeightedFile, ...] = ()
    val: tuple[str, ...] = ()  # Files of validation prompts; none: no validation.
    max_prompt_tokens: int = setting(1024, AT_LEAST_1)  # A longer prompt is an error, or dropped.
    on_long_prompt: Literal["error", "drop"] = "error"  # What happens to a longer prompt.
    shuffle: bool = True  # Each epoch in an order of its own, drawn from the seed.


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """The loop. Batch sizes count prompts; each has rollout.num_samples rows."""

    total_steps: int = setting(100, AT_LEAST_1)  # Steps of the run.
    prompts_per_step: int = setting(128, AT_LEAST_1)  # Prompts of a rollout batch.
    # Prompts per optimizer step; null means one optimizer step per batch.
    mini_batch_prompts: int | None = setting(None, AT_LEAST_1)
    num_epochs: int = setting(1, AT_LEAST_1)  # Passes over each batch.
    # Refuse to train if the first rollout's mean |Δ log-prob| exceeds this; null: 1e-4 float32, 0.05 bfloat16.
    mismatch_gate_nats: float | None = setting(None, POSITIVE, affects=("engines",))


@dataclass(frozen=True, slots=True, kw_only=True)
class SftConfig:
    """Supervised warm start on rows with a demonstration."""

    train: tuple[str, ...] = ()  # Files of rows with a demonstration.
    batch_size: int = setting(32, AT_LEAST_1)  # Rows per optimizer step.
    total_steps: int = setting(1000, AT_LEAST_1)  # Optimizer steps.


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRewardConfig:
    """Training of a reward model on preference pairs. The model is model.path, trained as `actor` says."""

    train: tuple[str, ...] = ()  # Files of pairs (parquet or JSONL).
    val: tuple[str, ...] = ()  # Files of held-out pairs; none: no validation.
    batch_size: int = setting(32, AT_LEAST_1)  # Pairs per optimizer step.
    total_steps: int = setting(500, AT_LEAST_1)  # Optimizer steps.
    val_every_steps: int = setting(100, AT_LEAST_1)  # Also before the first step and after the last.


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggingConfig:
    """What is kept of a run besides metrics.jsonl."""

    tensorboard: bool = True  # Also write event files.
    # Every this many steps, this many sampled rollouts go to RUN/rollouts as parquet (0: never).
    rollout_every_steps: int = setting(5, AT_LEAST_0)
    num_rollouts: int = setting(32, AT_LEAST_1)  # How many of a step's samples are kept.
    # Weights & Biases project that metrics also go to (needs the wandb package); null: none.
    wandb_project: str | None = None
    # First and last step of RL training of which every rank writes a torch profiler trace to RUN/profile; null: none.
    profile_steps: tuple[int, int] | None = None
    # Peak of one device in TFLOP/s for perf/mfu; null: the known peak of the device, or no perf/mfu.
    peak_tflops: float | None = setting(None, POSITIVE)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints under RUN/checkpoints, which `--resume` continues from. One is always written at the end."""

    # Every this many steps (0: only at the end, and when SIGTERM or SIGUSR1 stops the run).
    every_steps: int = setting(0, AT_LEAST_0)
    # Write while training goes on.
    async_save: bool = True
    # How many are kept: the last ones, and besides them those of the best validation scores.
    keep_last: int = setting(2, AT_LEAST_1)
    keep_best: int = setting(0, AT_LEAST_0)  # As above, by best_metric.
    # The score that keep_best compares: this metric's mean over data sources, higher is better.
    best_metric: Literal["val/test_score", "val/test_score_greedy"] = "val/test_score"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """The Ray cluster of the run: one that is started on this host and ends with the run, or one that runs already."""

    # HOST:PORT of a running Ray cluster, as `megarl slurm run` starts it; null: Ray is started on this host.
    address: str | None = None
    # Names of the hosts that must be part of it before the run starts; []: whatever is there.
    hosts: tuple[str, ...] = ()
    num_cpus: int | None = setting(None, AT_LEAST_1)  # Logical: they decide placement only; null: what the host has.
    object_store_mib: int = setting(256, Range(expected=">= 75", at_least=75))  # Of Ray, in shared memory.
    start_timeout_s: float = setting(180.0, POSITIVE)  # For processes to start and meet.
    collective_timeout_s: float = setting(120.0, POSITIVE)  # After which a rank that waits for another fails.


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The whole run."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    rewards: RewardsConfig = field(default_factory=RewardsConfig)
    placement: PlacementConfig = section(PlacementConfig, affects=("engines", "workers"))
    sync: SyncConfig = section(SyncConfig, affects=("engines",))
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    train_reward: TrainRewardConfig = field(default_factory=TrainRewardConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
