"""Define the configuration tree: every key that a user can set is a field here or in the modules imported here."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from megarl.config.algo import AlgoConfig
from megarl.config.engine import EngineConfig
from megarl.config.environments import EnvironmentConfig
from megarl.config.generation import (
    NodesConfig,
    PlacementConfig,
    RolloutConfig,
    SyncConfig,
    ValidationConfig,
)
from megarl.config.layout import LayoutConfig
from megarl.config.models import (
    ActorConfig,
    CriticConfig,
    CriticOptimizerConfig,
    HeadConfig,
    ModelConfig,
    MoeConfig,
    OptimizerConfig,
    ReferenceConfig,
    RewardModelConfig,
)
from megarl.config.rewards import RewardsConfig
from megarl.config.setting import AT_LEAST_0, AT_LEAST_1, POSITIVE, Range, Text, section, setting
from megarl.config.supervised import SftConfig, TrainPreferenceConfig, TrainRewardConfig
from megarl.config.teacher import TeacherConfig
from megarl.errors import ConfigError
from megarl.host.sharing import Share
from megarl.host.unicode import visible

__all__ = [
    "ActorConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "CriticConfig",
    "CriticOptimizerConfig",
    "DataConfig",
    "EngineConfig",
    "EnvironmentConfig",
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
    "TeacherConfig",
    "TrainPreferenceConfig",
    "TrainRewardConfig",
    "TrainerConfig",
    "ValidationConfig",
    "WeightedFile",
    "role_settings",
    "teacher_sections",
]

# Letters and digits of any script. No text of these can end a line, leave its directory, be taken for an option, or,
# once it is quoted, mean something to a shell, to Slurm (%) or to a format string.
_RUN_NAME = Text(
    expected="a single directory name of letters, digits, spaces and .,+=@~()_- that begins with a letter, a digit or "
    "_, and does not end with a space",
    holds=re.compile(r"\w(?:[\w .,+=@~()-]*[\w.,+=@~()-])?").fullmatch,
)
_PRINTABLE = Text(expected="a path without control characters", holds=lambda path: visible(path) == path)
_HOST = Text(
    expected="names of hosts, of letters, digits and ._-", holds=re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*").fullmatch
)
_ADDRESS = Text(
    expected="HOST:PORT of a running Ray cluster",
    holds=re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*:[0-9]+").fullmatch,
    is_address=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Set the directory that the run writes to, and the seed from which all randomness derives."""

    name: str = setting("run", _RUN_NAME)  # Name of the run; it writes to RUN = dir/name.
    dir: str = setting("runs", _PRINTABLE)  # Directory that holds runs.
    # Who else may read RUN, and the directory of an evaluation. null: only this user, whatever the umask is; group: its
    # group as well; everyone: every user of the host, and of others that see the directory.
    share: Share | None = None
    seed: int = setting(0, AT_LEAST_0)  # Seed that all randomness derives from.
    # Time limit of the trial of one's own code before a run (docs/dry-run.md); null: no trial.
    rehearsal_s: float | None = setting(60.0, POSITIVE)
    # Produce the same numbers in every run, resumed or not, by disabling the engines' prefix cache and using
    # the deterministic algorithms of torch and Transformer Engine and, on GPUs, vLLM's batch-invariant kernels.
    deterministic: bool = setting(False, affects=("workers",))
    # Compute log-probs by kernels whose results do not depend on what else is in a batch, in trainer and engines, on
    # CUDA. The two still differ from each other, by rounding; see docs/cuda.md.
    batch_invariant: bool = setting(False, affects=("engines", "workers"))


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedFile:
    """Name one prompt file of a mixture; each batch draws from the files in proportion to their weights."""

    path: str  # A parquet or JSONL file.
    # Weight of this file relative to the weights of the others.
    weight: float = setting(1.0, Range(expected="> 0; leave the file out instead", above=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Name the prompt files (parquet or JSONL) for training and validation."""

    # Training prompts. A list of paths is one concatenated data set; an entry {path: ..., weight: 2.0} makes the
    # list a weighted mixture, in which a plain path has weight 1.
    train: tuple[str | WeightedFile, ...] = ()
    val: tuple[str, ...] = ()  # Validation prompts; []: no validation.
    max_prompt_tokens: int = setting(1024, AT_LEAST_1)  # Maximum prompt length.
    on_long_prompt: Literal["error", "drop"] = "error"  # error: a longer prompt ends the run; drop: it is left out.
    # Arguments of the model's chat template by name, such as {enable_thinking: false}, for every chat that it renders:
    # training, validation, evaluation, demonstrations and hints.
    chat_template: Mapping[str, Any] = field(default_factory=dict)
    # Columns of the prompt files. The prompt is a list of {role, content}, or a text, which becomes a user turn.
    prompt_key: str = "prompt"
    # Column with the ground truth, as `label`; null: reward_model.ground_truth, as verl writes it.
    label_key: str | None = None
    # Column with an answer as the policy is to write it: a demonstration, a text or one assistant turn.
    target_key: str = "target"
    source_key: str = "data_source"  # Column with the data source, which decides how responses are judged.
    default_source: str | None = None  # Data source of rows that name none; null: such rows are an error.
    # Text of a system turn put before chats that have none, also those of supervised training; null: none. A row's
    # column system has precedence.
    system_prompt: str | None = None
    # Let the policy continue the assistant's turn with which a prompt ends; false: such a prompt is an error. Scorers
    # read only what the policy writes.
    prefill: bool = False
    # Column with the images of a row, for models that read images: one or a list, each its bytes, or a path relative to
    # the file. They stand in the place of each <image> in the row's texts. null: rows have texts alone.
    image_key: str | None = None
    max_image_pixels: int = setting(1 << 25, AT_LEAST_1)  # Number of pixels of the largest image that is read.
    shuffle: bool = True  # Shuffle the prompts anew in each epoch, with an order derived from run.seed.

    def check(self, key: str) -> None:
        """Raise ConfigError without training data."""
        if not self.train:
            raise ConfigError(f"{key}.train: is empty; list parquet or JSONL files, as in {key}.train=[a.parquet]")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """Set the length and batch sizes of training. Sizes count prompts, each with rollout.num_samples samples."""

    # Number of training steps: rollout, update, sync. 0 validates the model and ends.
    total_steps: int = setting(100, AT_LEAST_0)
    # Passes over the training prompts, which set total_steps to total_epochs · ⌊prompts / prompts_per_step⌋, or null.
    total_epochs: int | None = setting(None, AT_LEAST_1)
    prompts_per_step: int = setting(128, AT_LEAST_1)  # Prompts of one rollout batch.
    # Prompts per optimizer step; null: one optimizer step per batch.
    mini_batch_prompts: int | None = setting(None, AT_LEAST_1)
    num_epochs: int = setting(1, AT_LEAST_1)  # Passes over each rollout batch.
    # Refuse to train if the mean |Δ log-prob| between engine and trainer on the first rollout exceeds this; null:
    # 1e-4 for float32, 0.05 if trainer or engines compute in bfloat16, 0.2 for engines that round to float8.
    mismatch_gate_nats: float | None = setting(None, POSITIVE, affects=("engines",))

    def check(self, key: str) -> None:
        """Raise ConfigError unless the prompts of a step divide into whole mini-batches."""
        if self.mini_batch_prompts and self.prompts_per_step % self.mini_batch_prompts:
            raise ConfigError(
                f"{key}.mini_batch_prompts: got {self.mini_batch_prompts}, which does not divide "
                f"{key}.prompts_per_step={self.prompts_per_step}; set it to a divisor, or to null"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggingConfig:
    """Choose what a run records besides metrics.jsonl."""

    tensorboard: bool = True  # Also write TensorBoard event files.
    # Write sampled responses to RUN/rollouts, and measure how far layers move, every this many steps; 0: never.
    rollout_every_steps: int = setting(5, AT_LEAST_0)
    num_rollouts: int = setting(32, AT_LEAST_1)  # Number of samples that are written each time.
    # Largest number of samples per step, and per validation, that are written to RUN/reward_problems.jsonl because
    # they could not be judged or no answer was found in them.
    num_reward_problems: int = setting(32, AT_LEAST_0)
    # Weights & Biases project to which metrics are also logged (requires the wandb package); null: none.
    wandb_project: str | None = None
    mlflow_experiment: str | None = None  # The same for an experiment of MLflow (package mlflow or mlflow-skinny).
    trackio_project: str | None = None  # The same for a project of trackio (package trackio).
    swanlab_project: str | None = None  # The same for a project of SwanLab (package swanlab).
    # Port on which Prometheus can fetch the metrics of the last step, under /metrics; null: none. Only this host can,
    # unless there is a key.
    prometheus_port: int | None = setting(None, Range(expected="in 1 to 65535", at_least=1, at_most=65535))
    # Environment variable with the key that Prometheus sends as bearer token; then other hosts may fetch, too.
    prometheus_key_env: str | None = setting(None, needs_trust=True)
    # URL that takes traces of recorded samples (OTLP over HTTP; needs `pip install megarl[otel]`); null: none.
    otlp_endpoint: str | None = setting(None, needs_trust=True)
    # First and last training step to profile: every rank writes a torch profiler trace to RUN/profile; null:
    # none. RL training only.
    profile_steps: tuple[int, int] | None = None
    # Peak TFLOP/s of one device, for perf/mfu; null: the device's known peak (no perf/mfu if it is unknown).
    peak_tflops: float | None = setting(None, POSITIVE)

    def records(self, step: int, total_steps: int) -> bool:
        """Return whether samples of a training step are recorded."""
        return (every := self.rollout_every_steps) > 0 and (step % every == 0 or step in (1, total_steps))


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Configure the checkpoints in RUN/checkpoints, from which `--resume` continues; the run always ends with one."""

    # Steps between checkpoints; 0: only by time, at the end, and when a signal stops the run.
    every_steps: int = setting(0, AT_LEAST_0)
    # Minutes since the last checkpoint, or the start, after which the end of a step writes one, if the storage has room
    # for it; with keep_best, the end of a step with a validation; 0: never by time.
    every_minutes: float = setting(30.0, AT_LEAST_0)
    async_save: bool = True  # Write checkpoints while training continues.
    # Write every checkpoint so that a run can be continued from it under any layout; the one after the last step always
    # is. Others allow only another dp, but need no communication and less host memory; see docs/failures.md.
    portable: bool = False
    keep_last: int = setting(2, AT_LEAST_1)  # Number of most recent checkpoints to keep.
    # Number of checkpoints with the best validation scores to keep in addition.
    keep_best: int = setting(0, AT_LEAST_0)
    # Metric by which keep_best compares checkpoints: its mean over data sources, higher is better.
    best_metric: Literal["val/test_score", "val/test_score_greedy"] = "val/test_score"
    # Settings whose files may have changed since the checkpoint that a run continues from, such as data.train.
    accept_changed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Choose the run's Ray cluster: one that is started on this host and ends with the run, or a running one."""

    # HOST:PORT of a running Ray cluster, such as one started by `megarl slurm run`; null: start Ray on this host.
    address: str | None = setting(None, _ADDRESS, needs_trust=True)
    # Names of hosts that must have joined the cluster before the run starts; []: do not wait for any.
    hosts: tuple[str, ...] = setting((), _HOST)
    # The packages on the nodes, for which dry runs, `megarl plan` and `megarl slurm submit` check settings: a file that
    # containers/install.sh writes. null: the file that MEGARL_TARGET names, here or in slurm/env.sh; without one, this
    # machine's packages, or those of requirements/cuda.txt for GPUs that it lacks.
    target: str | None = None
    # Logical CPUs, which only affect placement; null: the number of CPUs of the host.
    num_cpus: int | None = setting(None, AT_LEAST_1)
    # Size of Ray's object store, which lies in shared memory; null: by the rows of a step and the host's memory.
    object_store_mib: int | None = setting(None, Range(expected=">= 75", at_least=75))
    start_timeout_s: float = setting(180.0, POSITIVE)  # Time limit for processes to start and connect to each other.
    # Time limit for an engine to load its model, compile kernels and capture CUDA graphs; the first start of a model
    # on a machine takes longest.
    engine_start_timeout_s: float = setting(1800.0, POSITIVE)
    # Time without a sign of life (busy engines give them, too) after which a hung engine is killed and replaced.
    heartbeat_timeout_s: float = setting(30.0, POSITIVE)
    # Time without an answer after which a host of a Slurm job counts as lost. A busy host may be silent for seconds,
    # while it locks memory, say, or starts a process. A Ray cluster that is already running keeps its own time limit.
    node_timeout_s: float = setting(30.0, Range(expected=">= 3", at_least=3.0))
    # Time limit of a collective operation, after which a rank that waits in it fails. It also counts time in which a
    # scheduler suspends the job, so it is a last resort: rollout.timeout_s, which does not, finds hung ranks.
    collective_timeout_s: float = setting(86400.0, POSITIVE)

    def check(self, key: str) -> None:
        """Raise ConfigError for hosts that cannot join, and for ranks that give up before a lost host can be named."""
        if self.collective_timeout_s <= self.node_timeout_s:
            raise ConfigError(
                f"{key}.collective_timeout_s: got {self.collective_timeout_s:g}, expected more than "
                f"{key}.node_timeout_s={self.node_timeout_s:g}, or ranks give up before a lost host can be named; "
                f"raise it, or lower {key}.node_timeout_s"
            )
        if self.hosts and self.address is None:
            raise ConfigError(
                f"{key}.hosts: is set, but without {key}.address Ray is started on this host alone; set "
                f"{key}.address=HOST:PORT, or remove it"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The whole configuration of a run."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    # Further teachers by name, each for some data sources or environments; `teacher` has the others.
    teachers: Mapping[str, TeacherConfig] = section(dict, needs_trust=True)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    rewards: RewardsConfig = field(default_factory=RewardsConfig)
    placement: PlacementConfig = section(PlacementConfig, affects=("engines", "workers"))
    sync: SyncConfig = section(SyncConfig, affects=("engines",))
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    train_reward: TrainRewardConfig = field(default_factory=TrainRewardConfig)
    train_preference: TrainPreferenceConfig = field(default_factory=TrainPreferenceConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    @property
    def image_store(self) -> str | None:
        """Return the directory that has the run's images by their digests; None: it reads texts alone."""
        return None if self.data.image_key is None else str(Path(self.run.dir).absolute() / self.run.name / "images")


def teacher_sections(config: Config) -> dict[str, TeacherConfig]:
    """Return the section of every teacher by its key, which is also the name of its role: teacher, teachers.NAME."""
    return {"teacher": config.teacher, **{f"teachers.{name}": each for name, each in config.teachers.items()}}


def role_settings(config: Config) -> dict[str, ActorConfig]:
    """Return the settings of every role by its name. Where a role has no setting of its own, the actor's is used.

    The result has all roles, whether or not the run needs them.
    """
    actor, critic = config.actor, config.critic
    settings = {"actor": actor}
    frozen: dict[str, RewardModelConfig | ReferenceConfig | TeacherConfig] = {
        "reference": config.reference,
        "reward_model": config.reward_model,
        **teacher_sections(config),
    }
    for role, own in (*frozen.items(), ("critic", critic)):
        settings[role] = replace(
            actor,
            lora=None,
            layout=own.layout or actor.layout,
            micro_batch_tokens=own.micro_batch_tokens or actor.micro_batch_tokens,
        )
    if config.algo.distill.averages:
        # Only the adapters of an actor are averaged.
        settings["teacher"] = replace(settings["teacher"], lora=actor.lora)
    settings["reward_model"] = replace(settings["reward_model"], lora=config.reward_model.lora)
    settings["critic"] = replace(
        settings["critic"], optimizer=critic.optimizer, recompute=critic.recompute, lora=critic.lora
    )
    return settings
