"""Load a rank's models (actor, reference, critic); wrap trained ones in Megatron's DDP and (distributed) AdamW."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import (
    MegatronOptimizer,
    ParamKey,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.muon import get_megatron_muon_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.config.lora import sent_alone
from megarl.config.schema import OptimizerConfig
from megarl.parallel.adapters import adapter_slices, attach_adapters
from megarl.parallel.averaging import MovingAverage
from megarl.parallel.building import build_model, model_slices, named_shards, rank_slices
from megarl.parallel.head.policy import HeadRequest
from megarl.parallel.layout import Layout
from megarl.parallel.model import PackedModel
from megarl.parallel.moe.router import prepare_experts
from megarl.parallel.optimizers import optimizer_settings
from megarl.parallel.versions import EarlierVersions
from megarl.types.messages import Head, RoleSpec, Teaching
from megarl.vision.reader import ImageReader
from megarl.vision.store import ImageStore
from megarl.weights.families import ModelSpec, read_model_spec
from megarl.weights.merging import Merger
from megarl.weights.rules import TOWER
from megarl.weights.slices import Slice


class Gradients(Enum):
    """The content of a role's gradient buffers: none that counts, this rank's own sums, or sums over all replicas."""

    NONE = auto()
    OWN = auto()
    REDUCED = auto()


@dataclass(slots=True, kw_only=True)
class LoadedRole:
    """A role's model on this rank (actor, critic, ...). If it is frozen, `ddp` is empty and `optimizer` is None.

    gradients: what the gradient buffers hold. average: what its weights are made from, if they follow the actor's.
    versions: what its weights were, if it keeps that.
    """

    spec: RoleSpec
    model_spec: ModelSpec
    chunks: list[PackedModel]
    ddp: list["HeadAwareDdp"]
    optimizer: MegatronOptimizer | None
    adapters: ModelSpec | None = None
    gradients: Gradients = Gradients.NONE
    average: MovingAverage | None = None
    versions: EarlierVersions | None = None
    # The role in whose memory this one's frozen weights are, if that is another.
    base: "LoadedRole | None" = None

    def settle(self) -> None:
        """Wait until this rank has all weights of the last update, which may still be on their way from others."""
        for each in self.ddp:
            each.finish_gathering()

    @contextlib.contextmanager
    def unreduced(self) -> Iterator[None]:
        """Within this context, leave the gradients of a pass as this rank's own sums, for `reduce_gradients`."""
        config = self.chunks[0].config
        names = ("finalize_model_grads_func", "no_sync_func")
        meant = {name: getattr(config, name) for name in names}
        try:
            with contextlib.ExitStack() as held:
                for each in self.ddp:
                    held.enter_context(each.no_sync())
                for name in names:
                    setattr(config, name, None)
                yield
        finally:
            for name, function in meant.items():
                setattr(config, name, function)

    def reduce_gradients(self) -> None:
        """Sum the gradients of passes that were `unreduced` over the replicas, and those that stages or ranks share."""
        for each in self.ddp:
            if each.ddp_config.overlap_grad_reduce:
                # Otherwise started by Megatron with the last micro-batch, and only awaited below.
                each.start_grad_sync()
        chunk = self.chunks[0]
        chunk.config.finalize_model_grads_func(self.ddp, pg_collection=chunk.layout.schedule_groups)
        self.gradients = Gradients.REDUCED

    def summed_gradients(self) -> Iterator[Slice]:
        """Return this rank's slices of the accumulated gradients, summed over replicas, as views of their buffers."""
        if self.gradients is Gradients.OWN:
            self.reduce_gradients()
        for each in self.ddp:
            each.gather_gradients()
        shards = [(name, shard) for chunk in self.chunks for name, _, shard in named_shards(chunk)]
        views = [(name, getattr(shard, "main_grad", None)) for name, shard in shards]
        trained = [(name, view) for name, view in views if view is not None]
        return rank_slices(trained, self.model_spec, self.chunks[0].layout)

    def expected_tensors(self, *, by_expert: bool = False) -> dict[str, tuple[int, ...]]:
        """Return name → full shape of the Hugging Face tensors of this model. by_expert: as in `model_slices`."""
        return self.model_spec.expected_tensors(scalar_head=self.spec.head is Head.SCALAR, by_expert=by_expert)

    def without_adapters(self, spec: RoleSpec) -> "LoadedRole":
        """Return the frozen base of this role as a role of its own, with the same memory."""
        return LoadedRole(
            spec=spec, model_spec=self.model_spec, chunks=self.chunks, ddp=self.ddp, optimizer=None, adapters=None
        )

    def merger(self) -> Merger | None:
        """Return what adds this rank's adapters to its weights; None: the role has no adapters."""
        if self.adapters is None or (lora := self.spec.settings.lora) is None:
            return None
        return Merger(self.model_spec, lora, adapter_slices(self.chunks, self.adapters))

    def weights(self, *, by_expert: bool = False) -> Iterator[Slice]:
        """Yield this rank's slices of the model's tensors: views of parameters, or merged copies with adapters.

        by_expert: as in `model_slices`.
        """
        slices, merger = model_slices(self.chunks, by_expert=by_expert), self.merger()
        return slices if merger is None else merger.slices(slices, model_slices(self.chunks, by_expert=True))

    def sent(self) -> tuple[ModelSpec, Iterator[Slice], Merger | None]:
        """Return the description of what weight syncs send, and this rank's slices of it: of the adapters alone, or of
        the weights without adapters, with what merges the adapters into them.
        """
        if self.adapters is not None and sent_alone(self.spec.settings.lora) is not None:
            return self.adapters, adapter_slices(self.chunks, self.adapters), None
        return self.model_spec, model_slices(self.chunks, by_expert=True), self.merger()

    def head_request(
        self,
        *,
        temperature: float,
        entropy_needs_grad: bool = False,
        token_local: bool = False,
        paired: bool = False,
        top_k: int | None = None,
        common: int | None = None,
        squares: bool = False,
        teaching: Teaching | None = None,
    ) -> HeadRequest:
        """Build a request to the model's head from these arguments and the role's settings."""
        return HeadRequest(
            temperature=temperature,
            settings=self.spec.settings.head,
            fp32_logits=self.spec.model.fp32_head,
            entropy_needs_grad=entropy_needs_grad,
            token_local=token_local,
            paired=paired,
            top_k=top_k,
            common=common,
            squares=squares,
            teaching=teaching,
        )


def load_role(
    spec: RoleSpec,
    layout: Layout,
    *,
    seed: int = 0,
    batch_invariant: bool = False,
    base: LoadedRole | None = None,
) -> LoadedRole:
    """Build a role's model chunks and read their weights. Unless the role is frozen, add DDP and an optimizer.

    batch_invariant: whether `make_batch_invariant` was called in this process. base: the role whose frozen weights this
    one shares.
    """
    model_spec = read_model_spec(spec.model.path, tower=spec.tower)
    reader = None if spec.vision is None else ImageReader(model_spec.path, ImageStore(Path(spec.vision.store)))
    chunks = build_model(
        model_spec,
        spec.model,
        spec.settings,
        layout,
        spec.head,
        batch_invariant=batch_invariant,
        base=None if base is None else base.chunks,
        reader=reader,
    )
    for chunk in chunks:
        chunk.replays_routing = spec.replays_routing
    adapters = None if spec.settings.lora is None else attach_adapters(chunks, spec.settings.lora, seed)
    if not spec.trainable:
        for chunk in chunks:
            chunk.requires_grad_(False)
        average = None if spec.update_rate is None else MovingAverage.of(chunks, spec.update_rate, adapters)
        return LoadedRole(
            spec=spec,
            model_spec=model_spec,
            chunks=chunks,
            ddp=[],
            optimizer=None,
            adapters=adapters,
            average=average,
            base=base,
        )
    prepare_experts(chunks, spec.settings.moe)
    ddp = wrap_ddp(chunks, spec.settings.optimizer)
    optimizer = build_optimizer(ddp, spec.settings.optimizer)
    return LoadedRole(
        spec=spec,
        model_spec=model_spec,
        chunks=chunks,
        ddp=ddp,
        optimizer=optimizer,
        adapters=adapters,
        versions=EarlierVersions(chunks=chunks, most=spec.kept_versions) if spec.kept_versions else None,
        base=base,
    )


class HeadAwareDdp(DistributedDataParallel):
    """Megatron's DDP for models whose log-prob head adds the gradient of its weight to `main_grad` itself.

    Autograd then has no gradient for an untied weight, without which Megatron refuses to overlap: a gradient that is
    not there might still come. Here it is final, since the head's part is added before autograd reaches the weight.

    With `overlap_param_gather`, a module waits for its own weights before it computes. The head is not a module of
    Megatron's, so what is still missing after the layers is waited for there.
    """

    def __init__(
        self, config: TransformerConfig, ddp_config: DistributedDataParallelConfig, chunk: PackedModel
    ) -> None:
        super().__init__(config, ddp_config, chunk)
        if self.use_forward_hook:
            for group in (*self.bucket_groups, *self.expert_parallel_bucket_groups):
                # All ranks have read the same weights: the first pass has nothing to gather.
                group.param_gather_dispatched = True
            chunk.decoder.register_forward_hook(lambda *_: self.finish_gathering())

    def start_gathering(self) -> None:
        """Begin to gather the weights that the data-parallel ranks have updated, if this is not done by the optimizer.

        All ranks call it at the same point, however many forward passes follow, and in the order of the layers.
        """
        if self.use_forward_hook:
            # From now on, modules only wait for what is under way.
            self.overlap_param_gather_with_optimizer_step = True
            for group in reversed([*self.expert_parallel_bucket_groups, *self.bucket_groups]):
                group.start_param_sync()

    def finish_gathering(self) -> None:
        """Wait for the weights that are still on their way to this rank."""
        for group in [*self.bucket_groups, *self.expert_parallel_bucket_groups]:
            if group.param_gather_handle is not None:
                group.finish_param_sync(skip_next_bucket_dispatch=True)

    def gather_gradients(self) -> None:
        """Give every replica all sums of gradients, of which the distributed optimizer leaves a part to each."""
        groups = [*self.bucket_groups, *self.expert_parallel_bucket_groups]
        for group in groups if self.ddp_config.use_distributed_optimizer else ():
            replicas = group.intra_distributed_optimizer_instance_group
            for bucket in group.buckets:
                shards = list(bucket.grad_data.chunk(replicas.size()))
                dist.all_gather(shards, shards[replicas.rank()].clone(), group=replicas)

    def _make_backward_post_hook(self, param: torch.nn.Parameter) -> Callable[..., None]:
        hook = super()._make_backward_post_hook(param)

        def count_as_ready(*_: object) -> None:
            is_absent = param.grad is None
            if is_absent:
                # It takes the memory of one element, and is not added.
                param.grad = param.detach().new_zeros(()).expand_as(param)
                param.grad_added_to_main_grad = True  # type: ignore[attr-defined]
            hook()
            if is_absent:
                # In the next micro-batch the weight may have one, if it is also the embedding.
                param.grad_added_to_main_grad = False  # type: ignore[attr-defined]

        return count_as_ready


def wrap_ddp(chunks: Sequence[PackedModel], config: OptimizerConfig) -> list[HeadAwareDdp]:
    """Wrap a rank's model chunks in Megatron's DDP, which sums gradients over replicas, instead of averaging them."""
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=config.grad_reduce_in_fp32,
        use_distributed_optimizer=config.distributed,
        overlap_grad_reduce=config.overlaps_grad_reduce,
        overlap_param_gather=config.overlaps_param_gather,
    )
    wrapped = [HeadAwareDdp(chunk.config, ddp_config, chunk) for chunk in chunks]
    for buffer in (each for ddp in wrapped for each in (*ddp.buffers, *ddp.expert_parallel_buffers)):
        for bucket in buffer.buckets:
            # Before a tied embedding, Megatron counts the alignment of its start, which no checkpoint then covers.
            bucket.numel_unpadded = max(buffer.param_index_map[each][1] for each in bucket.params) - bucket.offset
        buffer.numel_unpadded = sum(bucket.numel_unpadded for bucket in buffer.buckets)

    # The loss is already divided by global denominators: no second division by tokens.
    chunks[0].config.finalize_model_grads_func = lambda models, num_tokens=None, **named: finalize_model_grads(
        models, None, **named
    )
    if config.overlaps_grad_reduce:
        # Only the last micro-batch's gradients are complete.
        no_sync = [each.no_sync for each in wrapped]
        chunks[0].config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    return wrapped


# By the setting `algorithm`. Muon's settings are Adam's too, with which Megatron trains what is not a matrix.
_BUILDERS: dict[str, Callable[..., MegatronOptimizer]] = {
    "adam": get_megatron_optimizer,
    "muon": get_megatron_muon_optimizer,
}


def build_optimizer(chunks: Sequence[DistributedDataParallel], config: OptimizerConfig) -> MegatronOptimizer:
    """Build the optimizer of wrapped chunks: no decay of norms and biases, float32 main parameters for bfloat16."""
    settings = MegatronOptimizerConfig(**optimizer_settings(config, chunks[0].module.config.params_dtype))
    for name, parameter in (named for chunk in chunks for named in chunk.named_parameters()):
        # The one row of a value head, and a tower's embeddings of positions, are no matrices to orthogonalize.
        if config.algorithm == "muon" and name.endswith(("value_head.weight", "pos_embed.weight")):
            parameter.is_embedding_or_output_parameter = True
    # A tower's parameters have groups of their own, by a name under which a checkpoint finds them at any rate.
    groups = {ParamKey(name=f"*{TOWER}*"): {"is_decoupled_lr": True}, **get_standard_config_overrides(settings)}
    optimizer = _BUILDERS[config.algorithm](settings, list(chunks), groups)
    for group in optimizer.param_groups:
        # Megatron leaves this to its own scheduler, which we do not use.
        group["weight_decay"] = config.weight_decay * group["wd_mult"]
    return optimizer
