"""Define the configuration tree: every key that a user can set is a field here or in the modules imported here."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from megarl.config.algo import AlgoConfig
from megarl.config.environments import EnvironmentConfig
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
from megarl.config.setting import AT_LEAST_0, AT_LEAST_1, AT_LEAST_2, POSITIVE, Range, section, setting
from megarl.host.sharing import Share

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
    "TrainPreferenceConfig",
    "TrainRewardConfig",
    "TrainerConfig",
    "ValidationConfig",
    "WeightedFile",
    "role_settings",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Set the directory that the run writes to, and the seed from which all randomness derives."""

    # Name of the run; it writes to RUN = dir/name. Letters, digits, spaces and .,+=@~()_-, beginning with a letter, a
    # digit or _.
    name: str = "run"
    dir: str = "runs"  # Directory that holds runs.
    # Who else may read RUN, and the directory of an evaluation. null: only this user, whatever the umask is; group: its
    # group as well; everyone: every user of the host, and of others that see the directory.
    share: Share | None = None
    seed: int = setting(0, AT_LEAST_0)  # Seed that all randomness derives from.
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
    source_key: str = "data_source"  # Column with the data source, which decides how responses are judged.
    default_source: str | None = None  # Data source of rows that name none; null: such rows are an error.
    system_prompt: str | None = None  # Text of a system turn put before prompts that have none; null: none.
    shuffle: bool = True  # Shuffle the prompts anew in each epoch, with an order derived from run.seed.


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SftConfig:
    """Configure supervised fine-tuning on demonstrations and chats (`megarl sft`), such as a warm start for RL."""

    train: tuple[str, ...] = ()  # Parquet or JSONL files of chats, or of prompts with a demonstration; see docs/sft.md.
    val: tuple[str, ...] = ()  # Files of held-out rows; []: no validation.
    # Trained tokens. all: every answer of the assistant whose turn does not say otherwise. last: the last of these.
    # each: as all, with a row of its own for each answer. every_token: the whole chat, whoever speaks.
    train_on: Literal["all", "last", "each", "every_token"] = "all"
    # Limit on the whole row; null: data.max_prompt_tokens before the first trained token and
    # rollout.max_response_tokens from there on.
    max_tokens: int | None = setting(None, AT_LEAST_2)
    # Rows over the limit. error: the run does not start. drop: they are left out. cut: their ends are,
    # and the rows that would keep no trained token. The latter two are counted and reported.
    on_long: Literal["error", "drop", "cut"] = "error"
    # Column with the chat, a list of {role, content} or {from, value}; null: messages or conversations.
    chat_key: str | None = None
    # Column with the answer to data.prompt_key; null: target, response or completion.
    answer_key: str | None = None
    batch_size: int = setting(32, AT_LEAST_1)  # Rows per optimizer step.
    total_steps: int = setting(1000, AT_LEAST_1)  # Number of optimizer steps.
    # Passes over the rows, which set total_steps to ⌊total_epochs · rows / batch_size⌋, or null.
    total_epochs: int | None = setting(None, AT_LEAST_1)
    # Steps between validations, in addition to those before the first step and after the last.
    val_every_steps: int = setting(100, AT_LEAST_1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRewardConfig:
    """Configure reward-model training on preference pairs; it starts from model.path with the settings of `actor`."""

    train: tuple[str, ...] = ()  # Parquet or JSONL files of preference pairs.
    val: tuple[str, ...] = ()  # Files of held-out pairs; []: no validation.
    # Pairs over the length limits. error: the run does not start. drop: they are left out and counted.
    on_long: Literal["error", "drop"] = "error"
    batch_size: int = setting(32, AT_LEAST_1)  # Pairs per optimizer step.
    total_steps: int = setting(500, AT_LEAST_1)  # Number of optimizer steps.
    # Passes over the pairs, which set total_steps to ⌊total_epochs · pairs / batch_size⌋, or null.
    total_epochs: int | None = setting(None, AT_LEAST_1)
    # Steps between validations, in addition to those before the first step and after the last.
    val_every_steps: int = setting(100, AT_LEAST_1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainPreferenceConfig:
    """Configure the training of a policy on preference pairs (`megarl train-preference`), with the settings of `actor`
    and, for the reference model, of `reference`.
    """

    train: tuple[str, ...] = ()  # Parquet or JSONL files of preference pairs.
    val: tuple[str, ...] = ()  # Files of held-out pairs; []: no validation.
    # Pairs over the length limits. error: the run does not start. drop: they are left out and counted.
    on_long: Literal["error", "drop"] = "error"
    objective: str = "dpo"  # Name of the loss: dpo, ipo, kto or orpo; see docs/algorithms/preferences.md.
    # dpo, ipo, kto: strength of the tie to the reference model, which smaller values loosen. orpo: weight of the term
    # of odds.
    beta: float = setting(0.1, POSITIVE)
    desirable_weight: float = setting(1.0, POSITIVE)  # kto: weight of chosen responses, the paper's λ_D.
    undesirable_weight: float = setting(1.0, POSITIVE)  # kto: weight of rejected responses, the paper's λ_U.
    batch_size: int = setting(32, AT_LEAST_1)  # Pairs per optimizer step.
    total_steps: int = setting(500, AT_LEAST_1)  # Number of optimizer steps.
    # Passes over the pairs, which set total_steps to ⌊total_epochs · pairs / batch_size⌋, or null.
    total_epochs: int | None = setting(None, AT_LEAST_1)
    # Steps between validations, in addition to those before the first step and after the last.
    val_every_steps: int = setting(100, AT_LEAST_1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggingConfig:
    """Choose what a run records besides metrics.jsonl."""

    tensorboard: bool = True  # Also write TensorBoard event files.
    # Write sampled responses to RUN/rollouts as parquet every this many steps; 0: never.
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
    # First and last training step to profile: every rank writes a torch profiler trace to RUN/profile; null:
    # none. RL training only.
    profile_steps: tuple[int, int] | None = None
    # Peak TFLOP/s of one device, for perf/mfu; null: the device's known peak (no perf/mfu if it is unknown).
    peak_tflops: float | None = setting(None, POSITIVE)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Configure the checkpoints in RUN/checkpoints, from which `--resume` continues; the run always ends with one."""

    # Steps between checkpoints; 0: only at the end, and when SIGTERM or SIGUSR1 stops the run.
    every_steps: int = setting(0, AT_LEAST_0)
    async_save: bool = True  # Write checkpoints while training continues.
    # Write every checkpoint so that a run can be continued from it under any layout; the one after the last step always
    # is. Others allow only another dp, but need no communication and less host memory; see docs/resume.md.
    portable: bool = False
    keep_last: int = setting(2, AT_LEAST_1)  # Number of most recent checkpoints to keep.
    # Number of checkpoints with the best validation scores to keep in addition.
    keep_best: int = setting(0, AT_LEAST_0)
    # Metric by which keep_best compares checkpoints: its mean over data sources, higher is better.
    best_metric: Literal["val/test_score", "val/test_score_greedy"] = "val/test_score"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Choose the run's Ray cluster: one that is started on this host and ends with the run, or a running one."""

    # HOST:PORT of a running Ray cluster, such as one started by `megarl slurm run`; null: start Ray on this host.
    address: str | None = setting(None, needs_trust=True)
    # Names of hosts that must have joined the cluster before the run starts; []: do not wait for any.
    hosts: tuple[str, ...] = ()
    # Logical CPUs, which only affect placement; null: the number of CPUs of the host.
    num_cpus: int | None = setting(None, AT_LEAST_1)
    # Size of Ray's object store, which lies in shared memory.
    object_store_mib: int = setting(256, Range(expected=">= 75", at_least=75))
    start_timeout_s: float = setting(180.0, POSITIVE)  # Time limit for processes to start and connect to each other.
    # Time limit for an engine to load its model, compile kernels and capture CUDA graphs; the first start of a model
    # on a machine takes longest.
    engine_start_timeout_s: float = setting(1800.0, POSITIVE)
    # Time without a sign of life, also while it works, after which an engine counts as hung: it is killed and replaced.
    heartbeat_timeout_s: float = setting(30.0, POSITIVE)
    # Time after which a rank that waits for others in a collective operation fails. It covers the time by which ranks
    # read their parts of a checkpoint at different speeds.
    collective_timeout_s: float = setting(1800.0, POSITIVE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The whole configuration of a run."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
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


def role_settings(config: Config) -> dict[str, ActorConfig]:
    """Return the settings of every role by its name. Where a role has no setting of its own, the actor's is used.

    The result has all roles, whether or not the run needs them.
    """
    actor, critic = config.actor, config.critic
    settings = {"actor": actor}
    for role, own in (("reference", config.reference), ("critic", critic), ("reward_model", config.reward_model)):
        settings[role] = replace(
            actor,
            layout=own.layout or actor.layout,
            micro_batch_tokens=own.micro_batch_tokens or actor.micro_batch_tokens,
        )
    settings["critic"] = replace(settings["critic"], optimizer=critic.optimizer, recompute=critic.recompute)
    return settings
