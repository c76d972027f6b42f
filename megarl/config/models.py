"""Define the sections for the models of a run: their files, and the layout and training of each role."""

from dataclasses import dataclass, field
from typing import Literal

from megarl.config.layout import LayoutConfig
from megarl.config.lora import LoraConfig
from megarl.config.optimizer import TRANSFORMER_ENGINE as _TRANSFORMER_ENGINE
from megarl.config.optimizer import CriticOptimizerConfig, OptimizerConfig
from megarl.config.optimizer import require_kernels as _require_kernels
from megarl.config.recompute import RecomputeConfig
from megarl.config.setting import AT_LEAST_0, AT_LEAST_1, Range, section, setting
from megarl.config.target import has_package, known_devices, package_version
from megarl.config.vision import VisionConfig
from megarl.errors import ConfigError
from megarl.host.device.accelerators import FP8_RECIPES
from megarl.host.device.platform import platform


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Name the model to train, in Hugging Face's form: config.json, *.safetensors and a tokenizer."""

    # The model's directory, or its id on the Hugging Face hub (Qwen/Qwen3-1.7B), with a branch, tag or commit if not
    # the newest of main is meant (Qwen/Qwen3-1.7B@COMMIT); the run starts from these weights.
    path: str = ""
    # Directory whose config.json `train --dry-run` reads if `path` has none, one that comes with megarl also from
    # elsewhere (configs/model/hf/NAME); a run never reads it.
    config_path: str | None = None
    # Data type of weights and activations.
    dtype: Literal["float32", "bfloat16"] = setting("bfloat16", affects=("workers",))
    fp32_head: bool = False  # Compute the output head's logits in float32 whatever the dtype.
    vocab_multiple: int = setting(128, AT_LEAST_1)  # Vocabulary rows are padded to a multiple of this × tp.

    def check(self, key: str) -> None:
        """Raise ConfigError for no model, and for a data type that the layers on this machine cannot compute in."""
        if not self.path:
            raise ConfigError(f"{key}.path: is empty; set it to a directory with config.json and *.safetensors")
        if self.dtype == "float32" and platform().name == "cuda" and has_package(_TRANSFORMER_ENGINE):
            raise ConfigError(
                f"{key}.dtype: got float32, but Transformer Engine has no attention for packed sequences in float32; "
                f"set {key}.dtype=bfloat16"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """Limit the memory that log-prob computation uses for logits, which would otherwise be most of a micro-batch's
    memory.
    """

    # Kept by the head from forward to backward: nothing (recompute), the logits (keep), or their gradients
    # (in_chunk, for losses that are sums over tokens). auto: keep if the logits fit memory_mib, else in_chunk if
    # the loss allows it, else recompute.
    regime: Literal["auto", "recompute", "keep", "in_chunk"] = "auto"
    memory_mib: int = setting(1024, AT_LEAST_0)  # Memory per rank up to which auto keeps the logits.
    # Tokens whose logits are computed at a time; null: half the hidden size.
    chunk_tokens: int | None = setting(None, AT_LEAST_1)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """Configure the training of mixture-of-experts models; other models require the defaults."""

    # Weight of the load-balancing loss of every MoE layer, which is added to the policy loss; see docs/models.md.
    aux_loss_coef: float = setting(0.0, AT_LEAST_0)
    freeze_router: bool = False  # Train everything except the routers.
    # Send each token to the experts that it went to during the rollout (Sample.routed_experts), with weights from the
    # trainer's routers. A recorded rollout or, on CUDA, the engines know these experts.
    replay_routing: bool = False
    # How tokens reach the experts of other ranks. alltoall: NCCL; deepep: DeepEP's kernels, on CUDA.
    dispatcher: Literal["alltoall", "deepep"] = "alltoall"
    # Multiply by all of a rank's experts in one grouped GEMM, on CUDA; null: where Transformer Engine is installed.
    grouped_gemm: bool | None = None
    # Reorder tokens by expert in one kernel of Transformer Engine, on CUDA; null: where it can.
    fuse_permute: bool | None = None
    # Choose experts in one kernel of Transformer Engine, on CUDA; not with replay_routing, nor for models that choose
    # groups of experts first. null: where it can.
    fuse_router: bool | None = None

    def check(self, key: str) -> None:
        """Raise ConfigError unless this machine has the kernels that are set, and they leave the routing as it is."""
        if self.dispatcher == "deepep":
            _require_kernels(f"{key}.dispatcher: got deepep", "deep_ep", f"set {key}.dispatcher=alltoall")
        for name in ("grouped_gemm", "fuse_permute", "fuse_router"):
            if getattr(self, name):
                _require_kernels(f"{key}.{name}: got true", _TRANSFORMER_ENGINE, f"set {key}.{name}=false")
        self.check_fused(key)

    def check_fused(self, key: str, *, num_groups: int = 1) -> None:
        """Raise ConfigError if a fused kernel is asked for that a model with that many groups of experts cannot use."""
        for name in (name for name in FUSED_SINCE if getattr(self, name)):
            obstacle = fusion_obstacle(name, self, engine=transformer_engine_version(), num_groups=num_groups)
            if obstacle is not None:
                raise ConfigError(f"{key}.{name}: got true, but {obstacle}; set {key}.{name} to false or null")


# The first Transformer Engine with the kernels of a setting, as megatron-core 0.16.1 looks for them.
FUSED_SINCE = {"fuse_permute": (2, 1), "fuse_router": (2, 7)}


def fusion_obstacle(name: str, moe: MoeConfig, *, engine: tuple[int, ...] | None, num_groups: int) -> str | None:
    """Return why a fused kernel (a name of FUSED_SINCE) cannot be used, or None if it can: null then means true.

    engine: the version of Transformer Engine; None: there is none. num_groups: groups of experts, of which a token's
    best are chosen first.
    """
    chooses, since = name == "fuse_router", FUSED_SINCE[name]
    if chooses and moe.replay_routing:
        return "with replay_routing=true experts are given, and the fused kernel chooses all itself"
    if chooses and num_groups > 1:
        return f"the model has n_group={num_groups}, and the fused kernel rates groups of experts in its own way"
    if engine is None:
        return "there is no Transformer Engine"
    if engine < since:
        return f"it needs Transformer Engine {since[0]}.{since[1]}, and {'.'.join(map(str, engine))} is installed"
    return None


def fused_kernels(moe: MoeConfig, *, engine: tuple[int, ...] | None, num_groups: int) -> dict[str, bool]:
    """Return whether each kernel of FUSED_SINCE is used: as asked, or where it can be. Arguments as for an obstacle."""
    asked = {name: getattr(moe, name) for name in FUSED_SINCE}
    return {
        name: fusion_obstacle(name, moe, engine=engine, num_groups=num_groups) is None if wanted is None else wanted
        for name, wanted in asked.items()
    }


def groups_experts(moe: MoeConfig) -> bool:
    """Return whether all of a rank's experts are multiplied in one grouped product where the run computes."""
    return transformer_engine_version() is not None if moe.grouped_gemm is None else moe.grouped_gemm


def transformer_engine_version() -> tuple[int, ...] | None:
    """Return the version of Transformer Engine (major, minor) that runs compute with here; None: without it."""
    there = platform().name == "cuda" and has_package(_TRANSFORMER_ENGINE)
    found = package_version("transformer-engine") if there else None
    return None if found is None else tuple(int(part) for part in found.split(".")[:2])


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorConfig(RecomputeConfig):
    """Configure the actor, that is the policy in training. Other roles use its settings where they have none of their
    own.
    """

    layout: LayoutConfig = section(LayoutConfig, affects=("engines", "workers"))
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    moe: MoeConfig = field(default_factory=MoeConfig)
    # Train adapters in place of the weights; null: train the weights.
    lora: LoraConfig | None = section(lambda: None, affects=("engines", "workers"))
    vision: VisionConfig = field(default_factory=VisionConfig)
    # Matrix products of the layers in float8, with a scale per block (recipes of Transformer Engine); weights, their
    # gradients and the output head stay in model.dtype. blockwise: 128 × 128 weights and 1 × 128 activations, on H100
    # and later; mxfp8: 1 × 32, on B200. null: none.
    fp8: Literal["blockwise", "mxfp8"] | None = None
    # Tokens, prompts included, in one micro-batch on one data-parallel rank, for forward passes and for updates.
    micro_batch_tokens: int = setting(16384, AT_LEAST_1)
    head: HeadConfig = field(default_factory=HeadConfig)
    # Whether rows of a micro-batch that begin alike pass through the layers once for what they have in common; null:
    # where it has been run, that is, without Transformer Engine and without context parallelism.
    share_prefixes: bool | None = None
    # The kernel that computes attention over rows that share prefixes. gathered: kernels for rows, with each row's
    # queries and the gathered keys of its path; flex: torch's FlexAttention, one kernel over all rows of a micro-batch,
    # on CUDA and not for latents, capped scores or heads of less than 16. null: flex where it can and layers are not
    # Transformer Engine's.
    prefix_attention: Literal["gathered", "flex"] | None = None

    def check(self, key: str) -> None:
        """Raise ConfigError for float8 on a machine without it, a dispatcher with nothing to send, prefixes that cannot
        be shared, a tower that is trained beside adapters, and what `recompute` has no use for.
        """
        if self.share_prefixes and self.layout.cp > 1:
            raise ConfigError(
                f"{key}.share_prefixes: got true with {key}.layout.cp={self.layout.cp}, but ranks of context "
                f"parallelism have chunks of each row by its length; set {key}.layout.cp=1, or leave it null"
            )
        if self.prefix_attention == "flex":
            remedy = f"set {key}.prefix_attention=null"
            _require_kernels(f"{key}.prefix_attention: got flex", "triton", remedy)
            shares = not has_package(_TRANSFORMER_ENGINE) if self.share_prefixes is None else self.share_prefixes
            if not shares or self.layout.cp > 1:
                raise ConfigError(
                    f"{key}.prefix_attention: got flex with {key}.share_prefixes={self.share_prefixes} and "
                    f"{key}.layout.cp={self.layout.cp}, where rows share nothing; {remedy}, or set "
                    f"{key}.share_prefixes=true and {key}.layout.cp=1"
                )
        if self.lora is not None and self.vision.train != "none":
            raise ConfigError(
                f"{key}.vision.train: got {self.vision.train} with {key}.lora, but adapters are trained alone; set it "
                f"to none, or {key}.lora=null"
            )
        self.check_recompute(key)
        if self.moe.grouped_gemm is False and "moe_act" in (self.recompute_modules or ()):
            raise ConfigError(
                f"{key}.recompute_modules: got moe_act with {key}.moe.grouped_gemm=false, but Megatron recomputes it "
                "only within grouped GEMMs; remove one of them"
            )
        if self.fp8 is not None:
            _require_kernels(f"{key}.fp8: got {self.fp8}", _TRANSFORMER_ENGINE, f"set {key}.fp8=null")
            recipe = FP8_RECIPES[self.fp8]
            for device in known_devices():
                if device.capability is not None and not recipe.runs_on(device.capability):
                    raise ConfigError(
                        f"{key}.fp8: got {self.fp8}, which needs compute capability {recipe.expected}, but "
                        f"{device.name} has {device.capability:.1f}; set {key}.fp8 to another recipe, or to null"
                    )
        if self.moe.dispatcher == "deepep" and self.layout.ep * self.layout.etp == 1:
            raise ConfigError(
                f"{key}.moe.dispatcher: got deepep with ep=1 and etp=1, where no token leaves its rank; set "
                f"{key}.moe.dispatcher=alltoall, or raise {key}.layout.ep"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceConfig:
    """Configure the frozen reference model, for algorithms that read its log-probs."""

    # Layout of the reference, with the keys and defaults of actor.layout; it then runs in separate processes on
    # the devices of the actor's first ranks. null: the actor's layout and processes.
    layout: LayoutConfig | None = None
    # Directory or hub id of another model with the same tokenizer; null: model.path.
    model_path: str | None = None
    # Tokens in one micro-batch on one data-parallel rank; null: actor.micro_batch_tokens.
    micro_batch_tokens: int | None = setting(None, AT_LEAST_1)


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticConfig:
    """Configure the value model, for algorithms that read values. It trains on the same mini-batches as the actor, as
    often.
    """

    # Layout of the critic, as for reference.layout; null: the actor's layout and processes.
    layout: LayoutConfig | None = None
    # Directory or hub id of a language model or an exported critic with the same tokenizer; null: model.path. The
    # value head of a language model is initialised to 0.
    model_path: str | None = None
    optimizer: CriticOptimizerConfig = field(default_factory=CriticOptimizerConfig)
    # Train adapters and the value head in place of the weights. If actor.lora is set, too, and model and layout are the
    # actor's, both are in memory once. null: train the weights.
    lora: LoraConfig | None = None
    # Activations that backward recomputes: none, those of parts of a layer (selective), or those of whole layers
    # (full); which parts and layers, actor.recompute_modules, recompute_layers and recompute_unit say.
    recompute: Literal["none", "selective", "full"] = "none"
    # Tokens in one micro-batch on one data-parallel rank; null: actor.micro_batch_tokens.
    micro_batch_tokens: int | None = setting(None, AT_LEAST_1)
    freeze: bool = False  # Use the critic's values, but do not train it.
    # Clip new values to within this distance of those before the update, and take the larger of the clipped and
    # unclipped losses; null: no clipping.
    value_clip: float | None = setting(0.2, Range(expected="> 0, or null for no clipping", above=0))
    # Step, counted from 1, at which the actor's updates begin; before it only the critic trains.
    warmup_steps: int = setting(0, AT_LEAST_0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelConfig:
    """Configure the frozen reward model, for runs in which rewards.manager, or a part of the hybrid, is `model`."""

    # Layout of the reward model, as for reference.layout; null: the actor's layout and processes.
    layout: LayoutConfig | None = None
    # Directory or hub id of a model with a scalar head (score.weight), as exported by train-reward or saved by
    # transformers. It may have a different tokenizer and chat template. null: model.path, with the head of `lora`.
    model_path: str | None = None
    # Adapters on that model, which `lora.path` names, as exported by train-reward with actor.lora. If actor.lora is
    # set, too, and model and layout are the actor's, the weights below both are in memory once.
    lora: LoraConfig | None = None
    # Tokens in one micro-batch on one data-parallel rank; null: actor.micro_batch_tokens.
    micro_batch_tokens: int | None = setting(None, AT_LEAST_1)
