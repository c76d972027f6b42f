"""Define how Megatron-Core runs on each kind of device.

Megatron is imported only when it is needed: on a CPU the shim must come first, and `megarl doctor` calls
`check_megatron` where Megatron may not be installed.
"""

import functools
import importlib.metadata
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from megarl.errors import ConfigError
from megarl.host.device.platform import TESTED_MEGATRON, platform

if TYPE_CHECKING:
    from megarl.config.layout import LayoutConfig
    from megarl.weights.attention import AttentionOptions
    from megarl.weights.dims import Dims


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """How Megatron is set up on a kind of device, CPU or CUDA.

    needs_shim: whether `cpu_shim` replaces Megatron's CUDA calls. uses_transformer_engine: whether layers are
    Transformer Engine's; otherwise they are Megatron's local ones, with megarl's norm and attention. options: settings
    of TransformerConfig.
    """

    needs_shim: bool
    uses_transformer_engine: bool
    options: Mapping[str, Any]


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
            "deallocate_pipeline_outputs": False,
        },
    ),
    "cuda": cuda_backend(transformer_engine=find_spec("transformer_engine") is not None),
}


def packs_attention(options: "AttentionOptions", *, cp: int) -> bool:
    """Return whether a layer's attention is megarl's `PackedAttention`.

    It is so in layers that are not Transformer Engine's, and in those whose options that lacks: its ring of context-
    parallel ranks has no windows.
    """
    return not BACKENDS[platform().name].uses_transformer_engine or (cp > 1 and options.window is not None)


def shares_prompts(dims: "Dims", layout: "LayoutConfig") -> bool:
    """Return whether the rows of a micro-batch with the same prompt share its passage through a model's layers.

    Transformer Engine's attention and latent attention need every row whole, and experts count all rows' tokens.
    """
    return (
        not BACKENDS[platform().name].uses_transformer_engine
        and layout.cp == 1
        and dims.latent is None
        and dims.experts is None
    )


def prepare_megatron() -> None:
    """Check Megatron, activate the device, and install what it lacks there. Call it before importing megatron."""
    check_megatron()
    platform().activate()
    if BACKENDS[platform().name].uses_transformer_engine:
        from megatron.core.tensor_parallel import layers

        # Of Megatron's own linear layers only the output layer is built, which refuses fusion without apex. It never
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
def make_batch_invariant() -> Any:
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


def check_megatron() -> None:
    """Check that the installed megatron-core has every function and field that megarl relies on.

    Raises:
        ConfigError: something is missing; the message names it. The tested version passes without a check.
    """
    version = importlib.metadata.version("megatron-core")
    if version == TESTED_MEGATRON:
        return
    missing = [name for name, present in probe_megatron().items() if not present]
    if missing:
        raise ConfigError(
            f"megatron-core {version} lacks {', '.join(missing)}; install the tested megatron-core=={TESTED_MEGATRON}"
        )


def probe_megatron() -> dict[str, bool]:
    """Return, for each function or field of Megatron that megarl relies on, whether the installed version has it."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.transformer.transformer_config import TransformerConfig

    postprocess = getattr(GPTModel, "_postprocess", None)
    fields = TransformerConfig.__dataclass_fields__
    return {
        "GPTModel._postprocess(hidden_states)": postprocess is not None
        and "hidden_states" in inspect.signature(postprocess).parameters,
        "GPTModel(pg_collection)": "pg_collection" in inspect.signature(GPTModel.__init__).parameters,
        "PackedSeqParams.cu_seqlens_q": "cu_seqlens_q" in PackedSeqParams.__dataclass_fields__,
        "TransformerConfig.calculate_per_token_loss": "calculate_per_token_loss" in fields,
        "finalize_model_grads(num_tokens)": "num_tokens" in inspect.signature(finalize_model_grads).parameters,
        "schedules.get_forward_backward_func": hasattr(schedules, "get_forward_backward_func"),
    }
