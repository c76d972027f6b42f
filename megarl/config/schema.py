"""The configuration tree. Every key a user can set is a field here, with its unit in the name."""

from dataclasses import dataclass, field
from typing import Literal

from megarl.config.algo import AlgoConfig
from megarl.config.rewards import RewardsConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Where the run writes, and the seed everything random derives from."""

    name: str = "run"  # The run's directory is RUN = dir/name.
    dir: str = "runs"  # Where runs go.
    seed: int = 0  # All randomness derives from it.
    # Same numbers on every run, resumed or not: no prefix cache in the engine, torch's deterministic algorithms.
    deterministic: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A Hugging Face model directory (config.json, *.safetensors, tokenizer)."""

    path: str = ""  # The directory; its weights are where the run starts.
    # Directory whose config.json `train --dry-run` reads while `path` has none; a run never reads it.
    config_path: str | None = None
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # Of weights and activations.
    # Compute the output head's logits in float32 whatever the dtype.
    fp32_head: bool = False
    # Vocabulary rows are padded to a multiple of this × tp.
    vocab_multiple: int = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedFile:
    """A prompt file of a mixture; batches hold its prompts in proportion to its weight among the files' weights."""

    path: str  # Parquet or JSONL.
    weight: float = 1.0  # > 0, relative to the other files' weights.


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Prompt files (parquet or JSONL) for training and validation."""

    # Paths alone are one data set, end to end. One entry {path: ..., weight: 2.0} makes it a mixture by weight, in
    # which a path alone weighs 1.
    train: tuple[str | WeightedFile, ...] = ()
    val: tuple[str, ...] = ()  # Files of validation prompts; none: no validation.
    max_prompt_tokens: int = 1024  # A longer prompt is an error, or dropped.
    on_long_prompt: Literal["error", "drop"] = "error"  # What happens to a longer prompt.
    shuffle: bool = True  # Each epoch in an order of its own, drawn from the seed.


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutConfig:
    """Parallel layout of one role: world size = tp × cp × dp × pp, in Megatron's order of ranks."""

    tp: int = 1  # Tensor-parallel size.
    pp: int = 1  # Pipeline stages.
    cp: int = 1  # Context-parallel size.
    dp: int = 1  # Replicas.
    # Expert-parallel size: the experts of a layer are split over this many of the tp × cp × dp ranks of a stage.
    ep: int = 1
    etp: int = 1  # Tensor-parallel size of each expert, whatever tp is.
    sequence_parallel: bool = False  # Split norms' activations over tensor-parallel ranks.
    # Model chunks per pipeline rank (interleaved 1F1B); 1 means none.
    virtual_pp: int = 1
    # Layers of the first and of the last stage where they differ from the others'; null means an even split.
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None  # As above, for the last stage.
    # Overlapped point-to-point communication between pipeline stages.
    overlap_p2p: bool = False

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def stage_size(self) -> int:
        """Ranks of a pipeline stage."""
        return self.tp * self.cp * self.dp

    @property
    def expert_dp(self) -> int:
        """Ranks of a stage that hold the same part of the same experts."""
        return self.stage_size // (self.ep * self.etp)

    def dp_rank_of(self, rank: int) -> int:
        """Data-parallel coordinate of a global rank (ranks count tp fastest, then cp, dp, pp)."""
        return rank // (self.tp * self.cp) % self.dp


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """AdamW with warm-up and a schedule over the run's optimizer steps."""

    lr: float = 1e-6  # Peak learning rate.
    betas: tuple[float, float] = (0.9, 0.95)  # Decay of the two moments.
    eps: float = 1e-8  # Added to the root of the second moment.
    weight_decay: float = 0.01  # Decoupled.
    clip_grad_norm: float = 1.0  # Norm of all gradients together.
    warmup_steps: int = 0  # Optimizer steps of linear warm-up.
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # After warm-up.
    # Share of the run, at its end, over which the schedule decays; min_lr_frac is where it arrives.
    decay_frac: float = 1.0
    min_lr_frac: float = 0.0  # Share of lr at the end of the decay.
    # Shard optimizer state over data-parallel ranks.
    distributed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """The log-prob head, where a micro-batch's logits would take most of the memory."""

    # What it holds between forward and backward: nothing (recompute), the logits (keep), or their gradients already
    # (in_chunk, for losses that are sums over tokens). auto: keep within memory_mib, else in_chunk where the loss
    # allows it, else recompute.
    regime: Literal["auto", "recompute", "keep", "in_chunk"] = "auto"
    memory_mib: int = 1024  # Of logits that auto keeps on a rank.
    chunk_tokens: int | None = None  # Rows of logits in work at a time; null: hidden size / 2.


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """Training of models with experts; other models leave it alone."""

    # Weight of the load-balancing loss of every layer with experts (see docs/moe.md), added to the policy's.
    aux_loss_coef: float = 0.0
    freeze_router: bool = False  # Train everything but the routers.
    # Send tokens to the experts that the rollout recorded (Sample.routed_experts), weighted by the trainer's routers.
    replay_routing: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorConfig:
    """The trained policy on Megatron-Core. What other roles leave open is as here."""

    layout: LayoutConfig = field(default_factory=LayoutConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    moe: MoeConfig = field(default_factory=MoeConfig)
    # Activations recomputed in backward: attention only, or whole layers.
    recompute: Literal["none", "selective", "full"] = "none"
    # Tokens (prompt + response) of one micro-batch on one data-parallel rank, for scoring and for updates.
    micro_batch_tokens: int = 16384
    head: HeadConfig = field(default_factory=HeadConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceConfig:
    """The frozen reference, if the algorithm reads its log-probs."""

    # A layout of its own, with the keys of actor.layout and their defaults, in processes of its own on the devices of
    # the actor's first ranks; null: the actor's layout and processes.
    layout: LayoutConfig | None = None
    model_path: str | None = None  # Directory of another model with the same tokenizer; null: model.path.
    micro_batch_tokens: int | None = None  # Null: the actor's.


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticOptimizerConfig(OptimizerConfig):
    """The critic's own, over its own optimizer steps; keys as in actor.optimizer."""

    lr: float = 1e-5  # Peak learning rate.


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticConfig:
    """The value model, if the algorithm reads values. It takes the trainer's mini-batches and epochs."""

    # A layout of its own, as reference.layout; null: the actor's layout and processes.
    layout: LayoutConfig | None = None
    # Directory of a language model or of an exported critic, with the same tokenizer; null: model.path. The head of a
    # language model starts at 0.
    model_path: str | None = None
    optimizer: CriticOptimizerConfig = field(default_factory=CriticOptimizerConfig)
    # Activations recomputed in backward: attention only, or whole layers.
    recompute: Literal["none", "selective", "full"] = "none"
    micro_batch_tokens: int | None = None  # Null: the actor's.
    freeze: bool = False  # Score with it, but do not train it.
    # Values are clipped to this distance from those before the update, and the larger loss counts; null: not clipped.
    value_clip: float | None = 0.2
    # The step of the actor's first update, counted from 1; before it only the critic trains.
    warmup_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelConfig:
    """The frozen reward model, if rewards.manager asks for one."""

    # A layout of its own, as reference.layout; null: the actor's layout and processes.
    layout: LayoutConfig | None = None
    # Directory of a model with a scalar head (score.weight), as train-reward exports it or transformers saves it. It
    # may have a tokenizer and a chat template of its own.
    model_path: str | None = None
    micro_batch_tokens: int | None = None  # Null: the actor's.


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The vLLM engines, alike. Nulls leave the choice to vLLM."""

    num_engines: int = 1  # Each holds a full copy of the policy.
    # Tensor-parallel size of each engine.
    tp: int = 1
    max_num_seqs: int = 256  # Sequences decoded at a time.
    max_model_tokens: int | None = None  # Context length; null: the longest row.
    kv_cache_mib: int | None = None  # Per device.
    gpu_memory_utilization: float = 0.6  # Share of a device's memory that an engine takes.
    block_size: int | None = None  # Tokens per block of the KV cache.
    enforce_eager: bool = False  # No CUDA graphs.
    prefix_caching: bool = True  # Share the KV cache of equal prompts.


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """How samples are drawn. `replay` reads rollouts that an earlier run recorded."""

    source: Literal["vllm", "replay"] = "vllm"  # vLLM, or a recorded run's samples.
    num_samples: int = 8  # Samples per prompt: a group.
    temperature: float = 1.0  # Of sampling, and of all log-probs in training.
    top_p: float = 1.0  # Anything but 1 is refused in training.
    top_k: int = -1  # Anything but -1 is refused in training.
    max_response_tokens: int = 1024  # Longer responses are cut.
    timeout_s: float = 3600.0  # For one step's generation, and for one call of the trainer's ranks.
    # So many engines that die in a run are restarted; what they had not finished is generated again.
    max_engine_restarts: int = 3
    # Keep every step's rollout under RUN/records, for replay.
    record: bool = False
    replay_dir: str | None = None  # RUN/records of the recorded run.
    engine: EngineConfig = field(default_factory=EngineConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesConfig:
    """The nodes that a group of processes fills evenly; null: as many devices of each as it needs."""

    num_nodes: int = 1  # Nodes.
    devices_per_node: int | None = None  # Devices of each node.


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementConfig:
    """Whether engines share the trainer's devices (colocated) or have their own (split)."""

    mode: Literal["colocated", "split"] = "colocated"  # Where engines run.
    trainer: NodesConfig = field(default_factory=NodesConfig)
    # Only with mode=split.
    engines: NodesConfig = field(default_factory=NodesConfig)
    # Colocated: the trainer's memory moves to the host while engines generate, and they sleep while it works.
    offload: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncConfig:
    """Weight sync from trainer to engine. `verify` compares a checksum of every tensor on both sides."""

    verify: bool = False  # Slow; for tests and suspicions.
    # Through a file in the hosts' shared memory; or (split placement only) over a process group of the trainer's ranks
    # and the engines' workers: NCCL on CUDA, gloo on CPU; or by a bridge, which sends every worker only the slices that
    # it needs and shares no memory with: through shared memory within a host, by host_group between hosts.
    transport: Literal["file", "collective", "bridge"] = "file"
    # What connects several hosts: the network (by gloo; with the bridge by TCP connections of its own, to ports that
    # engines' hosts choose), or the devices' own connections (NCCL).
    host_group: Literal["gloo", "device"] = "gloo"
    # With the bridge: what weights are cast to on their way; null: nothing. float8_e4m3 has a scale per matrix, and
    # reaches vLLM as float32 again. The engine then answers with less precise weights than the trainer has.
    dtype: Literal["bfloat16", "float8_e4m3"] | None = None
    # With the bridge: send only elements that changed, which is exact. Costs a copy of what travels in host memory on
    # each side, and time to compare and check.
    delta: bool = False
    delta_full_every: int = 50  # With delta, each so many syncs send everything.
    # With the bridge on CUDA: ranks and engine workers on one device exchange what they share there, not through the
    # host's memory. Costs up to two messages of 128 MiB of device memory per pair.
    cuda_ipc: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationConfig:
    """Validation on data.val: sampled at `temperature` with `num_samples`, and greedily."""

    before_train: bool = True  # Also validate the policy that the run starts from.
    every_steps: int = 10  # And after the last step.
    num_samples: int = 1  # Sampled answers per prompt.
    temperature: float = 1.0  # Of the sampled answers.
    greedy: bool = True  # Also score one greedy answer per prompt.
    max_prompts: int | None = None  # The first ones of data.val; null: all.


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """The loop. Batch sizes count prompts; each has rollout.num_samples rows."""

    total_steps: int = 100  # Steps of the run.
    prompts_per_step: int = 128  # Prompts of a rollout batch.
    # Prompts per optimizer step; null means one optimizer step per batch.
    mini_batch_prompts: int | None = None
    num_epochs: int = 1  # Passes over each batch.
    # Refuse to train if the first rollout's mean |Δ log-prob| exceeds this; null: 1e-4 float32, 0.05 bfloat16.
    mismatch_gate_nats: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SftConfig:
    """Supervised warm start on rows with a demonstration."""

    train: tuple[str, ...] = ()  # Files of rows with a demonstration.
    batch_size: int = 32  # Rows per optimizer step.
    total_steps: int = 1000  # Optimizer steps.


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRewardConfig:
    """Training of a reward model on preference pairs. The model is model.path, trained as `actor` says."""

    train: tuple[str, ...] = ()  # Files of pairs (parquet or JSONL).
    val: tuple[str, ...] = ()  # Files of held-out pairs; none: no validation.
    batch_size: int = 32  # Pairs per optimizer step.
    total_steps: int = 500  # Optimizer steps.
    val_every_steps: int = 100  # Also before the first step and after the last.


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggingConfig:
    """What is kept of a run besides metrics.jsonl."""

    tensorboard: bool = True  # Also write event files.
    # Every this many steps, this many sampled rollouts go to RUN/rollouts as parquet (0: never).
    rollout_every_steps: int = 5
    num_rollouts: int = 32  # How many of a step's samples are kept.
    # Weights & Biases project that metrics also go to (needs the wandb package); null: none.
    wandb_project: str | None = None
    # First and last step of RL training of which every rank writes a torch profiler trace to RUN/profile; null: none.
    profile_steps: tuple[int, int] | None = None
    # Peak of one device in TFLOP/s for perf/mfu; null: the known peak of the device, or no perf/mfu.
    peak_tflops: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints under RUN/checkpoints, which `--resume` continues from. One is always written at the end."""

    # Every this many steps (0: only at the end, and when SIGTERM or SIGUSR1 stops the run).
    every_steps: int = 0
    # Write while training goes on.
    async_save: bool = True
    # How many are kept: the last ones, and besides them those of the best validation scores.
    keep_last: int = 2
    keep_best: int = 0  # As above, by best_metric.
    # The score that keep_best compares: this metric's mean over data sources, higher is better.
    best_metric: Literal["val/test_score", "val/test_score_greedy"] = "val/test_score"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """The Ray cluster of the run: one that is started on this host and ends with the run, or one that runs already."""

    # HOST:PORT of a running Ray cluster, as `megarl slurm run` starts it; null: Ray is started on this host.
    address: str | None = None
    # Names of the hosts that must be part of it before the run starts; []: whatever is there.
    hosts: tuple[str, ...] = ()
    num_cpus: int | None = None  # Logical: they decide placement only; null: what the host has.
    object_store_mib: int = 256  # Of Ray, in shared memory.
    start_timeout_s: float = 180.0  # For processes to start and meet.
    collective_timeout_s: float = 120.0  # After which a rank that waits for another fails.


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
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    train_reward: TrainRewardConfig = field(default_factory=TrainRewardConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
