"""Record the tensors of a rank's forward pass for `megarl bisect`, by hooks that leave the pass as it is."""

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayer

from megarl.parallel.model import PackedModel
from megarl.parallel.passes import forward_rows, unwrapped
from megarl.parallel.roles import LoadedRole
from megarl.types import Row
from megarl.types.passes import PassPlace, PassRecorder, Probe, merged


def record_row(loaded: LoadedRole, row: Row, temperature: float) -> dict[PassPlace, torch.Tensor]:
    """Compute a row's log-probs, and return the tensors of the pass; a stage's first rank has them all."""
    recorder, chunks = PassRecorder(), [unwrapped(chunk) for chunk in loaded.chunks]
    head = loaded.head_request(temperature=temperature)
    with recording(chunks, recorder):
        result = forward_rows(loaded.chunks, [row], [[0]], head, role=loaded.spec.role, step=0)
    values = gathered(recorder, chunks[0], row.num_tokens)
    for logprobs in result.quantities.get("logprobs", {}).values():
        values[PassPlace(Probe.LOGPROBS)] = torch.from_numpy(logprobs)
    return values if chunks[0].layout.tp_group.rank() == 0 else {}


@contextlib.contextmanager
def recording(chunks: Sequence[PackedModel], recorder: PassRecorder) -> Iterator[None]:
    """Record what the chunks of a rank compute while this context lasts."""
    with contextlib.ExitStack() as stack:
        for chunk in chunks:
            if chunk.pre_process:
                stack.enter_context(_after(chunk.embedding, recorder, Probe.EMBEDDING, None))
            for layer in chunk.decoder.layers:
                _record_layer(stack, layer, recorder, chunk)
            if (norm := chunk.decoder.final_layernorm) is not None:
                stack.enter_context(_after(norm, recorder, Probe.FINAL_NORM, None))
        yield


def gathered(recorder: PassRecorder, chunk: PackedModel, num_tokens: int) -> dict[PassPlace, torch.Tensor]:
    """Return what the tensor-parallel ranks of a stage recorded, put together; each may have some of the tokens."""
    group, values = chunk.layout.tp_group, recorder.values()
    parts: list[dict[PassPlace, torch.Tensor]] = [{} for _ in range(group.size())]
    dist.all_gather_object(parts, values, group=group)
    if chunk.config.sequence_parallel:
        own = [place for place in values if place.stage in _SPLIT]
        parts[0] |= {place: torch.cat([part[place] for part in parts]) for place in own}
    dims = chunk.spec.dims
    return merged(parts, num_heads=dims.num_heads, num_kv_heads=dims.num_kv_heads, num_tokens=num_tokens)


# Under sequence parallelism, ranks have some of the tokens of these.
_SPLIT = (
    *(
        Probe.EMBEDDING,
        Probe.ATTENTION_INPUT,
        Probe.ATTENTION_OUTPUT,
        Probe.STREAM,
        Probe.MLP_INPUT,
        Probe.MLP_OUTPUT,
    ),
    *(Probe.OUTPUT, Probe.FINAL_NORM),
)


def _record_layer(
    stack: contextlib.ExitStack, layer: TransformerLayer, recorder: PassRecorder, chunk: PackedModel
) -> None:
    number, head_dim, attention = layer.layer_number - 1, chunk.spec.dims.head_dim, layer.self_attention

    def before(module: torch.nn.Module, stage: Probe, size: int | None = None, argument: int = 0) -> None:
        def record(_: object, arguments: tuple[torch.Tensor, ...]) -> None:
            recorder.record(stage, number, arguments[argument].squeeze(1), size)

        stack.enter_context(module.register_forward_pre_hook(record))

    # Transformer Engine's layers may have the norm inside of what follows it.
    if not isinstance(layer.input_layernorm, IdentityOp) or not chunk.spec.family.norms_before:
        before(attention, Probe.ATTENTION_INPUT)
    if not isinstance(layer.pre_mlp_layernorm, IdentityOp) or not chunk.spec.family.norms_before:
        before(layer.mlp, Probe.MLP_INPUT)
    before(layer.pre_mlp_layernorm, Probe.STREAM)
    stack.enter_context(_after(attention, recorder, Probe.ATTENTION_OUTPUT, number))
    stack.enter_context(_after(layer.mlp, recorder, Probe.MLP_OUTPUT, number))
    stack.enter_context(_after(layer, recorder, Probe.OUTPUT, number, adds=False))
    if (down := getattr(layer.mlp, "linear_fc2", None)) is not None:
        before(down, Probe.MLP_HIDDEN)
    if not isinstance(attention, SelfAttention):
        return
    stages = [Probe.QUERY, Probe.KEY, Probe.VALUE]
    for i, norm in enumerate((attention.q_layernorm, attention.k_layernorm)):
        if isinstance(norm, torch.nn.Module) and not isinstance(norm, IdentityOp):
            before(norm, stages[i], head_dim)
            stages[i] = (Probe.QUERY_NORMED, Probe.KEY_NORMED)[i]
    for i, stage in enumerate((Probe.QUERY_TURNED, Probe.KEY_TURNED)):
        before(attention.core_attention, stage, head_dim, i)
    stack.enter_context(_after(attention.core_attention, recorder, Probe.ATTENDED, number, size=head_dim))
    compute = attention.get_query_key_value_tensors

    def computed(*arguments: object, **named: object) -> object:
        made = compute(*arguments, **named)
        for stage, value in zip(stages, made, strict=False):
            recorder.record(stage, number, value, head_dim)
        return made

    attention.get_query_key_value_tensors = computed
    stack.callback(delattr, attention, "get_query_key_value_tensors")


def _after(
    module: torch.nn.Module,
    recorder: PassRecorder,
    stage: Probe,
    layer: int | None,
    *,
    size: int | None = None,
    adds: bool = True,
) -> torch.utils.hooks.RemovableHandle:
    """Record what a module returns. adds: with the bias that Megatron returns beside it."""

    def record(_: object, arguments: object, made: object) -> None:
        value, *bias = made if isinstance(made, tuple) else (made,)
        if adds and bias and bias[0] is not None:
            value = value + bias[0]
        recorder.record(stage, layer, value.squeeze(1), size)

    return module.register_forward_hook(record)
