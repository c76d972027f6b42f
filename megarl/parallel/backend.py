"""Define how Megatron-Core runs on each kind of device.

Megatron is imported only when it is needed: on a CPU the shim must come first, and `megarl doctor` calls
`check_megatron` where Megatron may not be installed.
"""

import functools
import importlib
import importlib.metadata
import inspect
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from megarl.errors import ConfigError
from megarl.host.device.platform import TESTED_MEGATRON, platform

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec

    from megarl.config.models import ActorConfig
    from megarl.weights.attention import AttentionOptions
    from megarl.weights.families import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """How Megatron is set up on a kind of device, CPU or CUDA.

    needs_shim: whether `cpu_shim` replaces Megatron's CUDA calls. uses_transformer_engine: whether layers are
    Transformer Engine's; otherwise they are Megatron's local ones, with megarl's norm and attention. options: settings
    of TransformerConfig.
    """

    needs_shim: bool
    uses_transformer_engine: bool
    options: Mapping[str, object]


def cuda_backend(*, transformer_engine: bool) -> Backend:
    """Return the backend for GPUs, with or without the layers and fused kernels of Transformer Engine."""
    # The layers of Transformer Engine do it themselves, Megatron's by a kernel of apex.
    adds_up_gradients = transformer_engine or find_spec("fused_weight_gradient_mlp_cuda") is not None
    return Backend(
        needs_shim=False,
        uses_transformer_engine=transformer_engine,
        options={
            "gradient_accumulation_fusion": adds_up_gradients,
            "masked_softmax_fusion": transformer_engine,
            "persist_layer_norm": transformer_engine,
            "apply_rope_fusion": transformer_engine,
            "moe_grouped_gemm": transformer_engine,
            "bias_dropout_fusion": True,
            "bias_activation_fusion": True,
            "attention_softmax_in_fp32": True,
        },
    )


# By the platform's name.
BACKENDS = {
    "cpu": Backend(
        needs_shim=True,
        uses_transformer_engine=False,
        options={
            "use_cpu_initialization": True,
            "gradient_accumulation_fusion": False,
            "masked_softmax_fusion": False,
            "persist_layer_norm": False,
            "apply_rope_fusion": False,
            "bias_dropout_fusion": False,
            "bias_activation_fusion": False,
            "attention_softmax_in_fp32": True,
        },
    ),
    "cuda": cuda_backend(transformer_engine=find_spec("transformer_engine") is not None),
}


def packs_attention(options: "AttentionOptions", *, cp: int) -> bool:
    """Return whether a layer's attention is megarl's `PackedAttention`.

    That is so without Transformer Engine, and for options that it lacks: windows under context parallelism, capped
    scores, images that are seen whole, and sinks, which only its kernels of newer cuDNN have.
    """
    lacks = options.sinks or options.score_cap is not None or (cp > 1 and options.window is not None)
    lacks |= options.whole_images
    return lacks or not BACKENDS[platform().name].uses_transformer_engine


def shares_prefixes(settings: "ActorConfig") -> bool:
    """Return whether the rows of a micro-batch share their passage through a model's layers as far as they are alike.

    The ranks of context parallelism have chunks of each row, by its own length, and cannot share them.
    """
    wanted = settings.share_prefixes
    if wanted is None:
        wanted = not BACKENDS[platform().name].uses_transformer_engine
    return wanted and settings.layout.cp == 1


def flex_obstacle(spec: "ModelSpec") -> str | None:
    """Return what keeps torch's FlexAttention from computing a model's attention, or None."""
    obstacles = {
        "attention through latents, whose keys and values differ in width": spec.dims.latent is not None,
        "capped scores, with which its kernels failed on a GPU": spec.score_cap is not None,
        "heads of fewer than 16 dimensions": spec.dims.head_dim < 16,
        "images whose tokens attend to later ones": spec.sees_whole_images,
    }
    return next((what for what, found in obstacles.items() if found), None)


def attends_by_blocks(settings: "ActorConfig", spec: "ModelSpec", *, gathers: bool = True) -> bool:
    """Return whether packs have `PathAttention`. gathers: whether Transformer Engine attends to gathered keys here."""
    wanted = settings.prefix_attention
    if wanted is None:
        here = platform().name
        local = here == "cuda" and not (BACKENDS[here].uses_transformer_engine and gathers)
        able = flex_obstacle(spec) is None and find_spec("triton") is not None
        wanted = "flex" if local and able else "gathered"
    return wanted == "flex" and shares_prefixes(settings)


def prepare_megatron() -> None:
    """Check Megatron, activate the device, and install what it lacks there. Call it before importing megatron."""
    check_megatron()
    platform().activate()
    if BACKENDS[platform().name].uses_transformer_engine:
        from megatron.core.tensor_parallel import layers

        # Only the output layer is one of Megatron's own linear layers. It refuses fusion without apex, and never
        # computes: the log-prob head takes its weight.
        layers._grad_accum_fusion_available = True
    if BACKENDS[platform().name].needs_shim:
        from megarl.parallel import cpu_shim

        cpu_shim.install()
    elif not (find_spec("transformer_engine") or find_spec("apex")):
        from megarl.parallel import plain_adam

        plain_adam.install()
    if not BACKENDS[platform().name].uses_transformer_engine:
        from megatron.core.tensor_parallel import CheckpointWithoutOutput

        # Megatron takes its own default, False, for a recipe of float8, and asks Transformer Engine about it.
        CheckpointWithoutOutput.__init__.__defaults__ = (None,)


@functools.cache
def make_batch_invariant() -> object:
    """Make this process compute by Megatron's batch-invariant kernels, for good; return what keeps them in place.

    Megatron replaces torch's matrix products that allocate their results, in layers those of Transformer
    Engine; the log-prob head writes its logits into memory that is there.
    """
    import torch
    from megatron.core.transformer.custom_layers import batch_invariant_kernels as kernels

    kernels.enable_batch_invariant_mode()
    library = torch.library.Library("aten", "IMPL")
    library.impl("aten::mm.out", lambda a, b, *, out: out.copy_(kernels.mm_batch_invariant(a, b)), "CUDA")
    return library


def accepted(function: Callable[..., object], **arguments: object) -> dict[str, object]:
    """Return those of `arguments` that a function of the installed Megatron takes; other versions do without them."""
    return {name: each for name, each in arguments.items() if name in inspect.signature(function).parameters}


def module_spec(part: object) -> "ModuleSpec":
    """Return the spec of a layer's part, which newer Megatrons write as a partial of its class or of a class method.

    Its submodules are those of `part`: what is set in them counts.
    """
    if not isinstance(part, functools.partial):
        return part
    from megatron.core.transformer.spec_utils import ModuleSpec

    params = dict(part.keywords)
    module = getattr(part.func, "__self__", part.func)
    return ModuleSpec(module=module, submodules=params.pop("submodules"), params=params)


# megarl relies on these modules of megatron.core, a function or class in each, and its arguments or fields.
_RELIED_ON = (
    ("distributed", "finalize_model_grads", ("num_tokens",)),
    ("dist_checkpointing", "save", ("async_sharded_save", "content_metadata")),
    ("dist_checkpointing.optimizer", "get_param_id_to_sharded_param_map", ("optim_params_iter",)),
    ("dist_checkpointing.optimizer", "make_sharded_optimizer_tensor", ("model_param", "optim_param")),
    ("dist_checkpointing.serialization", "load_content_metadata", ()),
    ("dist_checkpointing.strategies.async_utils", "AsyncCallsQueue", ("persistent",)),
    ("dist_checkpointing.strategies.filesystem_async", "_get_write_results_queue", ()),
    ("dist_checkpointing.strategies.torch", "_get_filesystem_reader", ("cache_metadata",)),
    ("models.gpt.gpt_layer_specs", "get_gpt_layer_local_spec", ("num_experts", "multi_latent_attention")),
    ("models.gpt.gpt_model", "GPTModel", ("pg_collection", "transformer_layer_spec", "vp_stage")),
    ("models.gpt.gpt_model", "GPTModel._postprocess", ("hidden_states",)),
    ("packed_seq_params", "PackedSeqParams", ("cu_seqlens_q",)),
    ("pipeline_parallel.schedules", "get_forward_backward_func", ()),
    ("transformer.moe.moe_layer", "MoESubmodules", ("experts", "shared_experts")),
    ("transformer.moe.router", "TopKRouter.routing", ("logits",)),
    ("transformer.transformer_config", "TransformerConfig", ("calculate_per_token_loss", *BACKENDS["cpu"].options)),
    ("transformer.transformer_layer", "TransformerLayer", ("submodules", "pg_collection")),
)


def check_megatron() -> tuple[str, ...]:
    """Check that the installed megatron-core has every function and field that megarl relies on.

    Return what was looked for; nothing for a version that megarl is tested with.

    Raises:
        ConfigError: something is missing; the message names it.
    """
    version = importlib.metadata.version("megatron-core")
    if version in TESTED_MEGATRON:
        return ()
    found = probe_megatron()
    if missing := [name for name, present in found.items() if not present]:
        tested = " or ".join(f"megatron-core=={each}" for each in TESTED_MEGATRON)
        raise ConfigError(
            f"megatron-core {version} lacks {', '.join(missing)}, of {len(found)} functions, classes and fields that "
            f"were looked for; install a version that megarl is tested with, {tested}"
        )
    return tuple(found)


def probe_megatron() -> dict[str, bool]:
    """Return, for each function, class or field that megarl relies on, whether the installed Megatron has it."""
    found = {}
    for module, path, parameters in _RELIED_ON:
        try:
            part = operator.attrgetter(path)(importlib.import_module(f"megatron.core.{module}"))
            present = tuple(inspect.signature(part).parameters)
        except (ImportError, AttributeError):
            found[f"{module}.{path}"] = False
            continue
        found |= {f"{module}.{path}": True} | {f"{path}({name})": name in present for name in parameters}
    return found
