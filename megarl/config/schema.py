"""The configuration tree. Every key a user can set is a field here, with its unit in the name."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Where the run writes, and the seed everything random derives from."""

    name: str = "run"
    dir: str = "runs"
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A Hugging Face model directory (config.json, *.safetensors, tokenizer)."""

    path: str = ""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    # Vocabulary rows are padded to a multiple of this × tp.
    vocab_multiple: int = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Prompt files (parquet or JSONL) for training and validation."""

    train: tuple[str, ...] = ()
    val: tuple[str, ...] = ()
    max_prompt_tokens: int = 1024
    on_long_prompt: Literal["error", "drop"] = "error"
    shuffle: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageConfig:
    """Which estimator turns rewards into advantages."""

    estimator: str = "grpo"
    norm_by_std: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossConfig:
    """The policy loss per token and its clip range; `dual_clip` bounds the loss of negative advantages."""

    name: str = "ppo_clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KLConfig:
    """KL to the reference: in the loss, in the reward, or nowhere."""

    where: Literal["none", "loss", "reward"] = "none"
    estimator: str = "k3"
    coef: float = 0.001
    controller: Literal["fixed", "adaptive"] = "fixed"
    target_nats: float = 6.0
    horizon: float = 10000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgoConfig:
    """An algorithm is a composition: estimator × policy loss × KL × aggregation."""

    name: str = "grpo"
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    kl: KLConfig = field(default_factory=KLConfig)
    entropy_coef: float = 0.0
    aggregation: str = "token-mean"
    # Length that seq-mean-token-sum-norm divides by; null means rollout.max_response_tokens.
    aggregation_horizon_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutConfig:
    """Parallel layout of one role: world size = tp × dp."""

    tp: int = 1
    dp: int = 1
    sequence_parallel: bool = False

    @property
    def world_size(self) -> int:
        return self.tp * self.dp


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """AdamW with warm-up and a schedule over the run's optimizer steps."""

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip_grad_norm: float = 1.0
    warmup_steps: int = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    # Share of the run, at its end, over which the schedule decays; min_lr_frac is where it arrives.
    decay_frac: float = 1.0
    min_lr_frac: float = 0.0
    # Shard optimizer state over data-parallel ranks.
    distributed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorConfig:
    """The trained policy on Megatron-Core. The reference, if the algorithm needs one, shares its layout."""

    layout: LayoutConfig = field(default_factory=LayoutConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    # Tokens (prompt + response) of one micro-batch on one data-parallel rank, for scoring and for updates.
    micro_batch_tokens: int = 16384
    # Rows of logits that the log-prob head materialises at a time.
    head_chunk_tokens: int = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The vLLM engine. Nulls leave the choice to vLLM."""

    max_num_seqs: int = 256
    max_model_tokens: int | None = None
    kv_cache_mib: int | None = None
    gpu_memory_utilization: float = 0.6
    block_size: int | None = None
    enforce_eager: bool = False
    prefix_caching: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """How samples are drawn. `replay` reads rollouts that an earlier run recorded."""

    source: Literal["vllm", "replay"] = "vllm"
    num_samples: int = 8
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_response_tokens: int = 1024
    timeout_s: float = 3600.0
    # Keep every step's rollout under RUN/records, for replay.
    record: bool = False
    replay_dir: str | None = None
    engine: EngineConfig = field(default_factory=EngineConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncConfig:
    """Weight sync from trainer to engine. `verify` compares a checksum of every tensor on both sides."""

    verify: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationConfig:
    """Validation on data.val: sampled at `temperature` with `num_samples`, and greedily."""

    before_train: bool = True
    every_steps: int = 10
    num_samples: int = 1
    temperature: float = 1.0
    greedy: bool = True
    max_prompts: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """The loop. Batch sizes count prompts; each has rollout.num_samples rows."""

    total_steps: int = 100
    prompts_per_step: int = 128
    # Prompts per optimizer step; null means one optimizer step per batch.
    mini_batch_prompts: int | None = None
    num_epochs: int = 1
    # Refuse to train if the first rollout's mean |Δ log-prob| exceeds this; null: 1e-4 float32, 0.05 bfloat16.
    mismatch_gate_nats: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SftConfig:
    """Supervised warm start on rows with a demonstration."""

    train: tuple[str, ...] = ()
    batch_size: int = 32
    total_steps: int = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggingConfig:
    """What is kept of a run besides metrics.jsonl."""

    tensorboard: bool = True
    # Every this many steps, this many sampled rollouts go to RUN/rollouts as parquet (0: never).
    rollout_every_steps: int = 5
    num_rollouts: int = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """The Ray cluster of the run. `num_cpus` counts logical CPUs; null means what the host has."""

    num_cpus: int | None = None
    object_store_mib: int = 256
    start_timeout_s: float = 180.0
    collective_timeout_s: float = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The whole run."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
