"""What transformers and ranks of the trainer record of a row's pass, for `megarl bisect`."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from transformers import PreTrainedModel

from megarl.bisect.rules import merged_record
from megarl.config.schema import ActorConfig, LayoutConfig, ModelConfig
from megarl.types import Row
from megarl.types.passes import PassPlace, PassRecorder, Probe, RecordedPass
from megarl.weights.families import ModelSpec, read_model_spec
from tests.helpers.family_parity import load_transformers
from tests.helpers.rank_pool import RankContext
from tests.helpers.ranks import load_worker


def make_row(num_tokens: int, vocab: int, seed: int = 0) -> Row:
    """All tokens but the first are predicted."""
    ids = np.random.default_rng(seed).integers(0, vocab, num_tokens)
    return Row(
        uid="p", sample_index=0, token_ids=ids, num_prompt_tokens=1, loss_mask=np.ones(num_tokens - 1, dtype=bool)
    )


def record_ranks(
    context: RankContext, path: str, layout: LayoutConfig, row: Row, temperature: float = 1.0
) -> dict[PassPlace, torch.Tensor]:
    """What the trainer's ranks record; each stage's first rank has its part."""
    worker = load_worker(context, ActorConfig(layout=layout), ModelConfig(path=path, dtype="float32", vocab_multiple=4))
    return worker.record_pass(row, temperature)


@torch.no_grad()
def record_transformers(
    path: Path,
    row: Row,
    *,
    mistaken: Callable[[PreTrainedModel], None] | None = None,
    temperature: float = 1.0,
    stale_keys: int = 0,
) -> RecordedPass:
    """What transformers records, in the engine's place, after `mistaken` has changed its model.

    stale_keys: later tokens see other keys than their own in the place of so many first ones, as in a stale cache.
    """
    spec, hf, recorder = read_model_spec(path), load_transformers(path), PassRecorder()
    if mistaken is not None:
        mistaken(hf)
    base = getattr(hf.model, "language_model", hf.model)
    ids = torch.from_numpy(row.token_ids)[None]
    with ExitStack() as stack:
        current = [0]
        embedded: list[torch.Tensor] = []
        for number, layer in enumerate(base.layers):
            _record_layer(stack, recorder, number, layer, spec, current, embedded)
        stack.enter_context(_functions(hf, recorder, current, spec, stale_keys))
        stack.enter_context(
            base.norm.register_forward_hook(lambda m, a, y: recorder.record(Probe.FINAL_NORM, None, y[0]))
        )
        logits = hf(ids).logits[0].float() / temperature
    logprobs = logits[:-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    recorder.record(Probe.LOGPROBS, None, logprobs)
    values = merged_record(spec, [recorder.values()], row.num_tokens, scales_turned=True)
    return RecordedPass(token_ids=row.token_ids, values=values)


def _record_layer(
    stack: ExitStack,
    recorder: PassRecorder,
    number: int,
    layer: Any,
    spec: ModelSpec,
    current: list[int],
    embedded: list[torch.Tensor],
) -> None:
    dims = spec.dims

    def first(arguments: Sequence[Any], named: dict[str, Any]) -> torch.Tensor:
        value = arguments[0] if arguments else named["hidden_states"]
        return value.reshape(-1, value.shape[-1])

    def begin(_: object, arguments: Any, named: dict[str, Any]) -> None:
        current[0] = number
        if number == 0:
            recorder.record(Probe.EMBEDDING, None, first(arguments, named))

    def before(module: Any, stage: Probe) -> None:
        stack.enter_context(
            module.register_forward_pre_hook(
                lambda m, a, k: recorder.record(stage, number, first(a, k)), with_kwargs=True
            )
        )

    def after(module: Any, stage: Probe, size: int | None = None) -> None:
        def record(_: object, __: object, made: Any) -> None:
            value = made[0] if isinstance(made, tuple) else made
            recorder.record(stage, number, value.reshape(len(current_ids(value)), -1), size)

        def current_ids(value: torch.Tensor) -> torch.Tensor:
            return value[0] if value.ndim == 3 and value.shape[0] == 1 else value

        stack.enter_context(module.register_forward_hook(record))

    stack.enter_context(layer.register_forward_pre_hook(begin, with_kwargs=True))
    after(layer, Probe.OUTPUT)
    mlp = getattr(layer, "mlp", None) or layer.block_sparse_moe
    before(mlp, Probe.MLP_INPUT)
    after(mlp, Probe.MLP_OUTPUT)
    if hasattr(mlp, "down_proj") and isinstance(mlp.down_proj, torch.nn.Linear):
        before(mlp.down_proj, Probe.MLP_HIDDEN)
    if spec.family.norms_before:
        norm = layer.pre_feedforward_layernorm if spec.family.norms_after else layer.post_attention_layernorm
        before(norm, Probe.STREAM)
    attention = getattr(layer, "self_attn", None)
    if attention is None:
        return
    before(attention, Probe.ATTENTION_INPUT)
    after(attention, Probe.ATTENTION_OUTPUT)
    if dims.latent is not None:
        return
    if hasattr(attention, "qkv_proj"):
        sizes = [n * dims.head_dim for n in (dims.num_heads, dims.num_kv_heads, dims.num_kv_heads)]

        def split(_: object, __: object, made: torch.Tensor) -> None:
            for stage, value in zip((Probe.QUERY, Probe.KEY, Probe.VALUE), made[0].split(sizes, -1), strict=True):
                recorder.record(stage, number, value, dims.head_dim)

        stack.enter_context(attention.qkv_proj.register_forward_hook(split))
    else:
        if not dims.gated:
            after(attention.q_proj, Probe.QUERY, dims.head_dim)
        after(attention.k_proj, Probe.KEY, dims.head_dim)
        after(attention.v_proj, Probe.VALUE, dims.head_dim)


@contextmanager
def _functions(
    hf: PreTrainedModel, recorder: PassRecorder, current: list[int], spec: ModelSpec, stale_keys: int
) -> Iterator[None]:
    """Record what the functions get and give by which transformers' models turn heads and attend."""
    module = sys.modules[type(hf).__module__]
    turn, attend = getattr(module, "apply_rotary_pos_emb", None), module.eager_attention_forward

    def turning(q: torch.Tensor, k: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        if spec.dims.qk_norm or spec.family.wide_qk_norm:
            for stage, value in ((Probe.QUERY_NORMED, q), (Probe.KEY_NORMED, k)):
                recorder.record(stage, current[0], value[0].transpose(0, 1))
        return turn(q, k, *arguments, **named)

    def attending(m: Any, query: torch.Tensor, key: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        for stage, value in ((Probe.QUERY_TURNED, query), (Probe.KEY_TURNED, key)):
            recorder.record(stage, current[0], value[0].transpose(0, 1))
        made = attend(m, query, key, *arguments, **named)
        if stale_keys:
            other = torch.cat([key[:, :, :stale_keys].flip(2), key[:, :, stale_keys:]], 2)
            made[0][:, stale_keys:] = attend(m, query, other, *arguments, **named)[0][:, stale_keys:]
        recorder.record(Probe.ATTENDED, current[0], made[0][0])
        return made

    if spec.dims.latent is not None or turn is None:
        yield
        return
    with (
        patch.object(module, "apply_rotary_pos_emb", turning),
        patch.object(module, "eager_attention_forward", attending),
    ):
        yield
