"""Record the tensors of a pass inside vLLM's workers for `megarl bisect`, by hooks on its layers."""

import contextlib
import pickle
from collections.abc import Callable, Sequence

import torch

from megarl.rollout.engine import VllmEngine
from megarl.types.passes import PassPlace, PassRecorder, Probe
from megarl.weights.families import ModelSpec


def record_pass(engine: VllmEngine, token_ids: Sequence[int]) -> list[dict[PassPlace, torch.Tensor]]:
    """Return what each worker of an engine computes of a sequence, with the log-probs beside the first one's."""
    engine.llm.collective_rpc("start_recording")
    (logprobs,) = engine.prompt_logprobs([token_ids])
    parts = [pickle.loads(part) for part in engine.llm.collective_rpc("stop_recording")]
    parts[0][PassPlace(Probe.LOGPROBS)] = torch.from_numpy(logprobs)
    return parts


_MLPS = ("mlp", "block_sparse_moe", "feed_forward", "moe")


class ModelHooks:
    """The hooks on a vLLM model, which record what its layers get and return until `close`."""

    def __init__(self, model: torch.nn.Module, spec: ModelSpec) -> None:
        self.recorder, self._stack, self._spec = PassRecorder(), contextlib.ExitStack(), spec
        # Layers share the module that turns heads.
        self._layer, self._turning = 0, set[torch.nn.Module]()
        base = next(m for m in model.modules() if isinstance(getattr(m, "layers", None), torch.nn.ModuleList))
        for number, layer in enumerate(base.get_submodule("layers").children()):
            if any(True for _ in layer.parameters()):
                self._hook_layer(number, layer)
        if isinstance(base.norm, torch.nn.Module):
            self._after(base.norm, lambda made: self.recorder.record(Probe.FINAL_NORM, None, _first(made)))

    def close(self) -> PassRecorder:
        """Remove the hooks, and return what they recorded."""
        self._stack.close()
        return self.recorder

    def _hook_layer(self, number: int, layer: torch.nn.Module) -> None:
        record, family, head_dim = self.recorder.record, self._spec.family, self._spec.dims.head_dim

        def begin(*seen: object) -> None:
            self._layer = number
            if number == 0:
                record(Probe.EMBEDDING, None, _first(seen))

        self._before(layer, begin)
        self._after(layer, lambda made: record(Probe.OUTPUT, number, _total(made)))
        mlp = next(getattr(layer, name) for name in _MLPS if hasattr(layer, name))
        self._before(mlp, lambda *seen: record(Probe.MLP_INPUT, number, _first(seen)))
        self._after(mlp, lambda made: record(Probe.MLP_OUTPUT, number, _first(made)))
        if hasattr(mlp, "down_proj"):
            self._before(mlp.down_proj, lambda *seen: record(Probe.MLP_HIDDEN, number, _first(seen)))
        if family.norms_before:
            norm = layer.get_submodule(f"{'pre_feedforward' if family.norms_after else 'post_attention'}_layernorm")
            self._before(norm, lambda *seen: record(Probe.STREAM, number, _total(seen)))
        attention = next((getattr(layer, name) for name in ("self_attn", "attn") if hasattr(layer, name)), None)
        if attention is None:
            return
        self._before(attention, lambda *seen: record(Probe.ATTENTION_INPUT, number, _first(seen)))
        self._after(attention, lambda made: made is None or record(Probe.ATTENTION_OUTPUT, number, _first(made)))
        # Only a worker has vLLM's layers.
        from vllm.model_executor.layers.attention import Attention

        core = next((m for m in attention.modules() if isinstance(m, Attention)), None)
        if core is None:
            return

        def projected(made: object) -> None:
            sizes = [attention.q_size, attention.kv_size, attention.kv_size]
            for stage, value in zip((Probe.QUERY, Probe.KEY, Probe.VALUE), _first(made).split(sizes, -1), strict=True):
                record(stage, number, value, head_dim)

        def attended(*seen: object) -> None:
            for stage, value in zip((Probe.QUERY_TURNED, Probe.KEY_TURNED), _tensors(seen), strict=False):
                record(stage, number, value, head_dim)

        if hasattr(attention, "qkv_proj") and not self._spec.dims.gated:
            self._after(attention.qkv_proj, projected)
        self._before(core, attended)
        self._after(core, lambda made: record(Probe.ATTENDED, number, _first(made), head_dim))
        turn = getattr(attention, "rotary_emb", None)
        if turn is not None and (self._spec.dims.qk_norm or family.wide_qk_norm) and turn not in self._turning:
            self._turning.add(turn)
            self._before(turn, self._normed)

    def _normed(self, *seen: object) -> None:
        for stage, value in zip((Probe.QUERY_NORMED, Probe.KEY_NORMED), _tensors(seen), strict=False):
            self.recorder.record(stage, self._layer, value, self._spec.dims.head_dim)

    def _before(self, module: torch.nn.Module, record: Callable[..., object]) -> None:
        def hook(_: object, arguments: tuple[object, ...], named: dict[str, object]) -> None:
            record(*arguments, *named.values())

        self._stack.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))

    def _after(self, module: torch.nn.Module, record: Callable[[object], object]) -> None:
        def hook(_: object, __: object, made: object) -> None:
            record(made)

        self._stack.enter_context(module.register_forward_hook(hook))


def _tensors(values: object) -> list[torch.Tensor]:
    """Return the tensors of numbers among arguments or results, such as hidden states; positions are not among them."""
    several = values if isinstance(values, tuple) else (values,)
    return [value for value in several if isinstance(value, torch.Tensor) and value.is_floating_point()]


def _first(values: object) -> torch.Tensor:
    return _tensors(values)[0]


def _total(values: object) -> torch.Tensor:
    """Add up hidden states and the residual stream, which vLLM adds to them only in the norm that follows."""
    return torch.stack([value.float() for value in _tensors(values)]).sum(0)
