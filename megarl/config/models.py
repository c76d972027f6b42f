"""The models of a run: their files, and the layout and the training of each role."""

from dataclasses import dataclass, field
from typing import Literal

from megarl.config.setting import AT_LEAST_0, AT_LEAST_1, BELOW_1, FRACTION, POSITIVE, SHARE, Range, section, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A Hugging Face model directory (config.json, *.safetensors, tokenizer)."""

    path: str = ""  # The directory; its weights are where the run starts.
    # Directory whose config.json `train --dry-run` reads while `path` has none; a run never reads it.
    config_path: str | None = None
    dtype: Literal["float32", "bfloat16"] = setting("bfloat16", affects=("workers",))  # Of weights and activations.
    # Compute the output head's logits in float32 whatever the dtype.
    fp32_head: bool = False
    # Vocabulary rows are padded to a multiple of this × tp.
    vocab_multiple: int = setting(128, AT_LEAST_1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutConfig:
    """Parallel layout of one role: world size = tp × cp × dp × pp, in Megatron's order of ranks."""

    tp: int = setting(1, AT_LEAST_1)  # Tensor-parallel size.
    pp: int = setting(1, AT_LEAST_1)  # Pipeline stages.
    cp: int = setting(1, AT_LEAST_1)  # Context-parallel size.
    dp: int = setting(1, AT_LEAST_1)  # Replicas.
    # Expert-parallel size: the experts of a layer are split over this many of the tp × cp × dp ranks of a stage.
    ep: int = setting(1, AT_LEAST_1)
    etp: int = setting(1, AT_LEAST_1)  # Tensor-parallel size of each expert, whatever tp is.
    sequence_parallel: bool = False  # Split norms' activations over tensor-parallel ranks.
    # Model chunks per pipeline rank (interleaved 1F1B); 1 means none.
    virtual_pp: int = setting(1, AT_LEAST_1)
    # Layers of the first and of the last stage where they differ from the others'; null means an even split.
    first_stage_layers: int | None = setting(None, AT_LEAST_1)
    last_stage_layers: int | None = setting(None, AT_LEAST_1)  # As above, for the last stage.
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

    lr: float = setting(1e-6, POSITIVE)  # Peak learning rate.
    betas: tuple[float, float] = setting((0.9, 0.95), BELOW_1)  # Decay of the two moments.
    eps: float = setting(1e-8, POSITIVE)  # Added to the root of the second moment.
    weight_decay: float = setting(0.01, AT_LEAST_0)  # Decoupled.
    # Norm of all gradients together.
    clip_grad_norm: float = setting(1.0, Range(expected="> 0 (1e9 never clips)", above=0))
    warmup_steps: int = setting(0, AT_LEAST_0)  # Optimizer steps of linear warm-up.
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # After warm-up.
    # Share of the run, at its end, over which the schedule decays; min_lr_frac is where it arrives.
    decay_frac: float = setting(1.0, SHARE)
    min_lr_frac: float = setting(0.0, FRACTION)  # Share of lr at the end of the decay.
    # Shard optimizer state over data-parallel ranks.
    distributed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """The log-prob head, where a micro-batch's logits would take most of the memory."""

    # What it holds between forward and backward: nothing (recompute), the logits (keep), or their gradients already
    # (in_chunk, for losses that are sums over tokens). auto: keep within memory_mib, else in_chunk where the loss
    # allows it, else recompute.
    regime: Literal["auto", "recompute", "keep", "in_chunk"] = "auto"
    memory_mib: int = setting(1024, AT_LEAST_0)  # Of logits that auto keeps on a rank.
    chunk_tokens: int | None = setting(None, AT_LEAST_1)  # Rows of logits in work at a time; null: hidden size / 2.


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """Training of models with experts; other models leave it alone."""

    # Weight of the load-balancing loss of every layer with experts (see docs/moe.md), added to the policy's.
    aux_loss_coef: float = setting(0.0, AT_LEAST_0)
    freeze_router: bool = False  # Train everything but the routers.
    # Send tokens to the experts that the rollout recorded (Sample.routed_experts), weighted by the trainer's routers.
    replay_routing: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorConfig:
    """The trained policy on Megatron-Core. What other roles leave open is as here."""

    layout: LayoutConfig = section(LayoutConfig, affects=("engines", "workers"))
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    moe: MoeConfig = field(default_factory=MoeConfig)
    # Activations recomputed in backward: attention only, or whole layers.
    recompute: Literal["none", "selective", "full"] = "none"
    # Tokens (prompt + response) of one micro-batch on one data-parallel rank, for scoring and for updates.
    micro_batch_tokens: int = setting(16384, AT_LEAST_1)
    head: HeadConfig = field(default_factory=HeadConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceConfig:
    """The frozen reference, if the algorithm reads its log-probs."""

    # A layout of its own, with the keys of actor.layout and their defaults, in processes of its own on the devices of
    # the actor's first ranks; null: the actor's layout and processes.
    layout: LayoutConfig | None = None
    model_path: str | None = None  # Directory of another model with the same tokenizer; null: model.path.
    micro_batch_tokens: int | None = setting(None, AT_LEAST_1)  # Null: the actor's.


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticOptimizerConfig(OptimizerConfig):
    """The critic's own, over its own optimizer steps; keys as in actor.optimizer."""

    lr: float = setting(1e-5, POSITIVE)  # Peak learning rate.


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
    micro_batch_tokens: int | None = setting(None, AT_LEAST_1)  # Null: the actor's.
    freeze: bool = False  # Score with it, but do not train it.
    # Values are clipped to this distance from those before the update, and the larger loss counts; null: not clipped.
    value_clip: float | None = setting(0.2, Range(expected="> 0, or null for no clipping", above=0))
    # The step of the actor's first update, counted from 1; before it only the critic trains.
    warmup_steps: int = setting(0, AT_LEAST_0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelConfig:
    """The frozen reward model, if rewards.manager asks for one."""

    # A layout of its own, as reference.layout; null: the actor's layout and processes.
    layout: LayoutConfig | None = None
    # Directory of a model with a scalar head (score.weight), as train-reward exports it or transformers saves it. It
    # may have a tokenizer and a chat template of its own.
    model_path: str | None = None
    micro_batch_tokens: int | None = setting(None, AT_LEAST_1)  # Null: the actor's.
