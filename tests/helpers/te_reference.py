"""Transformer Engine's own Python classes on a CPU: what they call of its compiled extension is computed by torch.

`install` must come before Megatron is imported, in a process of its own: it is for good.
"""

import enum
import functools
import itertools
import os
import sys
import types
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch

from tests.helpers.rank_pool import RankContext
from tools import install as installer

DTYPES = "kByte kInt32 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat4E2M1"
# Compiled enumerations of which only names matter.
NUMBERED = (
    "CommOverlapType",
    "FP8BwdTensors",
    "FP8FwdTensors",
    "NVTEScalingMode",
    "NVTE_Bias_Type",
    "NVTE_Mask_Type",
    "NVTE_QKV_Format",
    "NVTE_QKV_Layout",
    "NVTE_Softmax_Type",
    "NVTEQBHistogramMode",
    "NVTERoutingMapFormat",
)


class Numbered:
    """It numbers the names that are asked for."""

    def __init__(self) -> None:
        self._names: list[str] = []

    def __getattr__(self, name: str) -> int:
        if name not in self._names:
            self._names.append(name)
        return self._names.index(name)


class Extension(types.ModuleType):
    """The module `transformer_engine_torch`. Functions that are not here raise when they are called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_: object, **__: object) -> None:
            raise NotImplementedError(f"transformer_engine_torch.{name} has no reference")

        return missing


def product(a: torch.Tensor, turns_a: bool, b: torch.Tensor, turns_b: bool) -> torch.Tensor:
    """cuBLAS's product of column-major matrices: b·a of these, each turned if asked for."""
    return (b.t() if turns_b else b) @ (a.t() if turns_a else a)


def generic_gemm(
    a: torch.Tensor,
    turns_a: bool,
    b: torch.Tensor,
    turns_b: bool,
    out: torch.Tensor | None,
    quantizer: None,
    dtype: Any,
    bias: torch.Tensor | None,
    bias_dtype: Any,
    gelu: bool,
    gelu_in: None,
    grad: bool,
    workspace: Any,
    workspace_size: int,
    accumulate: bool,
    *_: object,
    **__: object,
) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
    shape, (a, b) = b.shape, (each.reshape(-1, each.shape[-1]) for each in (a, b))
    made = product(a, turns_a, b, turns_b)
    of_bias = b.sum(0) if grad and bias is not None else None
    if bias is not None and not grad:
        made = made + bias
    if out is None:
        return (made if turns_b else made.view(*shape[:-1], -1)), of_bias, None, None
    out.copy_(out + made if accumulate else made)
    return out, of_bias, None, None


def grouped_gemm(
    a: Sequence[torch.Tensor],
    turns_a: bool,
    b: Sequence[torch.Tensor],
    turns_b: bool,
    out: Sequence[torch.Tensor],
    dtype: Any,
    m_splits: Sequence[int],
    bias: Sequence[torch.Tensor],
    bias_dtype: Any,
    single_output: bool,
    gelu_in: Any,
    grad: bool,
    workspaces: Any,
    workspace_size: int,
    accumulate: bool,
    *_: object,
) -> Sequence[torch.Tensor]:
    parts = out[0].split(list(m_splits)) if single_output else out
    for i, part in enumerate(parts):
        made = product(a[i], turns_a, b[i], turns_b)
        if bias[i].numel() and not grad:
            made = made + bias[i]
        elif bias[i].numel():
            bias[i].copy_(b[i].sum(0))
        part.copy_(part + made if accumulate else made)
    return bias


def rmsnorm_fwd(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: None, quantizer: None, dtype: Any, margin: int, adds: bool
) -> tuple[torch.Tensor, None, torch.Tensor]:
    inverse = (x.float().square().mean(-1) + eps).rsqrt()
    return (x.float() * inverse[..., None] * (weight.float() + adds)).to(x.dtype), None, inverse


def rmsnorm_bwd(
    grad: torch.Tensor, x: torch.Tensor, inverse: torch.Tensor, weight: torch.Tensor, margin: int, adds: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    normed, of_normed = x.float() * inverse[..., None], grad.float() * (weight.float() + adds)
    mean = (of_normed * normed).mean(-1, keepdim=True)
    of_x = ((of_normed - normed * mean) * inverse[..., None]).to(x.dtype)
    return of_x, (grad.float() * normed).flatten(0, -2).sum(0).to(weight.dtype)


def as_read(bounds: torch.Tensor) -> list[int]:
    """The numbers that a kernel finds where a tensor begins: it takes them to lie side by side."""
    return torch.as_strided(bounds, bounds.shape, (1,), bounds.storage_offset()).tolist()


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What is asked of fused attention over packed rows (format thd)."""

    scale: float
    window: int
    bottom_right: bool
    bounds: Sequence[torch.Tensor]
    tensors: Sequence[torch.Tensor]

    def compute(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        lengths, keys, starts, key_starts = (as_read(each) for each in self.bounds)
        assert all(each.is_contiguous() for each in (q, k, v))
        outputs = []
        for i, (first, first_key) in enumerate(zip(starts[:-1], key_starts[:-1], strict=True)):
            n, m = lengths[i + 1] - lengths[i], keys[i + 1] - keys[i]
            own = q[first : first + n].transpose(0, 1)
            seen, values = (
                each[first_key : first_key + m].transpose(0, 1).repeat_interleave(len(own) // each.shape[1], 0)
                for each in (k, v)
            )
            # The key at which a query stands.
            place = torch.arange(n)[:, None] + (m - n if self.bottom_right else 0) - torch.arange(m)
            hidden = (place < 0) | ((place > self.window) if self.window >= 0 else torch.tensor(False))
            scores = (self.scale * own.float() @ seen.float().mT).masked_fill(hidden, -torch.inf)
            outputs.append((scores.softmax(-1) @ values.float()).transpose(0, 1).to(q.dtype))
        return torch.cat(outputs)


def fused_attn_fwd(*arguments: Any) -> list[torch.Tensor]:
    scale, window, bottom_right = arguments[3], arguments[12][0], arguments[13]
    (cu_q, cu_k, q, k, v), (padded_q, padded_k) = arguments[14:19], arguments[20:22]
    call = AttentionCall(scale, window, bottom_right, (cu_q, cu_k, padded_q, padded_k), (q, k, v))
    return [call.compute(q, k, v), torch.zeros(1), torch.zeros(2)]


def fused_attn_bwd(*arguments: Any) -> list[torch.Tensor | None]:
    scale, window, bottom_right = arguments[2], arguments[14][0], arguments[15]
    (cu_q, cu_k), (q, k, v), grad = arguments[17:19], arguments[19:22], arguments[23]
    padded_q, padded_k = arguments[26:28]
    call = AttentionCall(scale, window, bottom_right, (cu_q, cu_k, padded_q, padded_k), (q, k, v))
    with torch.enable_grad():
        leaves = [each.detach().requires_grad_() for each in (q, k, v)]
        made = call.compute(*leaves)
        return [*torch.autograd.grad(made, leaves, grad.view(made.shape)), None, None]


def rotated(t: torch.Tensor, freqs: torch.Tensor, bounds: torch.Tensor, sign: int) -> torch.Tensor:
    """Rotary positions of packed rows [T, heads, d], each of which begins with the first of the angles."""
    read = as_read(bounds)
    places = torch.cat([torch.arange(end - start) for start, end in itertools.pairwise(read)])
    angles, (turned, kept) = freqs[places, 0], t.split([freqs.shape[-1], t.shape[-1] - freqs.shape[-1]], -1)
    first, second = turned.float().chunk(2, -1)
    turned = turned.float() * angles.cos() + sign * torch.cat([-second, first], -1) * angles.sin()
    return torch.cat([turned.to(t.dtype), kept], -1)


def fused_rope(
    t: torch.Tensor, freqs: torch.Tensor, start: None, form: int, *arguments: Any, sign: int
) -> torch.Tensor:
    interleaved, bounds, cp, _ = arguments
    assert (start, interleaved, cp) == (None, False, 1)
    return rotated(t, freqs, bounds, sign)


def multi_tensor_l2norm(chunk: int, noop: Any, lists: Any, per_tensor: bool) -> tuple[torch.Tensor, None]:
    return torch.stack([each.norm() for each in lists[0]]).norm()[None], None


def multi_tensor_scale(chunk: int, noop: Any, lists: Any, scale: float) -> None:
    for source, target in zip(*lists, strict=True):
        target.copy_(scale * source)


def extension() -> Extension:
    made = Extension("transformer_engine_torch")
    made.DType = enum.IntEnum("DType", DTYPES.split(), start=0)  # type: ignore[misc]
    made.NVTE_Fused_Attn_Backend = enum.IntEnum(  # type: ignore[misc]
        "NVTE_Fused_Attn_Backend", {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2}
    )
    for name in NUMBERED:
        setattr(made, name, Numbered())
    made.CommOverlap = made.CommOverlapP2P = object
    made.generic_gemm, made.te_general_grouped_gemm = generic_gemm, grouped_gemm
    made.rmsnorm_fwd, made.rmsnorm_bwd = rmsnorm_fwd, rmsnorm_bwd
    # They are imported, and not called.
    made.layernorm_fwd, made.layernorm_bwd = made.layernorm_fwd, made.layernorm_bwd
    made.fused_attn_fwd, made.fused_attn_bwd = fused_attn_fwd, fused_attn_bwd
    made.get_fused_attn_backend = lambda _: (made.NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen, "")
    made.fused_rope_forward = functools.partial(fused_rope, sign=1)
    made.fused_rope_backward = functools.partial(fused_rope, sign=-1)
    made.multi_tensor_l2norm = multi_tensor_l2norm
    made.multi_tensor_scale = made.multi_tensor_scale_tensor = multi_tensor_scale
    made.get_num_cublas_streams = lambda: 1
    made.get_cublasLt_version = lambda: 130000
    made.get_cudnn_version = lambda: 91300
    return made


def install(context: RankContext) -> None:
    """Let this process find Transformer Engine, and megarl's ranks on a CPU use it as they do on an H100."""
    folder = installer.folder_apart(Path(sys.prefix), installer.KERNELS)
    assert (folder / "transformer_engine").is_dir(), f"{folder} has no Transformer Engine; run `make install`"
    # Its loader of shared libraries is for machines with CUDA.
    os.environ["NVTE_PROJECT_BUILDING"] = "1"
    sys.path.append(str(folder))
    sys.modules["transformer_engine_torch"] = extension()
    # It is about exports to ONNX, and needs packages of theirs.
    sys.modules["transformer_engine.pytorch.onnx_extensions"] = MagicMock()
    hopper = SimpleNamespace(major=9, minor=0, multi_processor_count=132, name="NVIDIA H100", total_memory=80 << 30)
    torch.cuda.get_device_properties = lambda *_: hopper  # type: ignore[assignment]
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformer_engine.common

        transformer_engine.common.load_framework_extension = lambda _: None
        import transformer_engine.pytorch
        from transformer_engine.pytorch.attention.dot_product_attention import backends, utils
    choose = utils.get_attention_backend
    # In float32, in which alone results can be compared closely, what is chosen in bfloat16. The module asks `all`
    # whether the numbers have 16 bits.
    utils.get_attention_backend = lambda params: choose(replace(params, qkv_dtype=torch.bfloat16))
    backends.all = lambda _: True
    from megarl.parallel import backend

    cuda, here = backend.cuda_backend(transformer_engine=True).options, backend.BACKENDS["cpu"]
    fused = ("apply_rope_fusion", "gradient_accumulation_fusion", "moe_grouped_gemm", "persist_layer_norm")
    options = {**here.options, **{name: cuda[name] for name in fused}}
    backend.BACKENDS["cpu"] = replace(here, uses_transformer_engine=True, options=options)
    torch.cuda.is_available = lambda: True
    torch.Tensor.is_cuda = True  # type: ignore[assignment]
    torch.cuda.is_current_stream_capturing = lambda: False


def forests_despite(
    context: RankContext, fault: str, *arguments: Any, **named: Any
) -> tuple[list[tuple[float, float]], list[str]]:
    """What `forest_errors` gives where fused attention is absent or wrong, and what was warned of."""
    from transformer_engine.pytorch.attention.dot_product_attention import dot_product_attention

    from tests.helpers.forests import forest_errors

    # It remembers what it chose for the same rows.
    dot_product_attention._attention_backends["backend_selection_requires_update"] = True
    compiled = sys.modules["transformer_engine_torch"]
    none = compiled.NVTE_Fused_Attn_Backend.NVTE_No_Backend
    faults: dict[str, dict[str, Any]] = {
        "absent": {"get_fused_attn_backend": lambda _: (none, "not on this device")},
        "lost": {"fused_attn_bwd": lambda *a: [fused_attn_bwd(*a)[0], a[20] * torch.nan, a[21], None, None]},
        "wrong": {"fused_attn_fwd": lambda *a: [fused_attn_fwd(*a)[0] * 1.1, torch.zeros(1), torch.zeros(2)]},
    }
    with patch.multiple(compiled, **faults[fault]), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = forest_errors(context, *arguments, **named)
    return found, [str(each.message) for each in caught if "prefixes" in str(each.message)]
