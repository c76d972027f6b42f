"""Add adapters (LoRA; Hu et al. 2021, arXiv:2106.09685) to Megatron's linear layers, under any layout.

The output of a layer becomes W·x + s·B·(A·x), s = alpha/rank, by a hook: the layer itself is the base model's. Each
rank holds A [tensors·rank, in] of a column-parallel layer whole, and those rows of B that belong to its rows of W,
packed alike (`tensors`: the matrices stacked in W, such as gate and up). It holds those columns of A of a row-parallel
layer that belong to its columns of W, and B whole. So ranks exchange rank numbers per token and part, never hidden
states.
"""

import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias, cast

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from torch.distributed import ProcessGroup

from megarl.config.lora import LoraConfig
from megarl.parallel.building import model_slices, named_shards, rank_slices
from megarl.parallel.model import PackedModel, ValueModel
from megarl.weights.adapters import adapter_name, adapter_spec
from megarl.weights.dims import Dims
from megarl.weights.families import ModelSpec
from megarl.weights.peft_files import initial_tensor, read_adapters
from megarl.weights.rules import Partition, WeightRule
from megarl.weights.slices import Slice, Split, load_slices, num_groups, shard_boxes
from megarl.weights.tables import VALUE_HEAD

# The groups of rows that are packed alike, and each part's rows in a group and the number of its A.
Packing: TypeAlias = tuple[int, Sequence[tuple[int, int]]]


class Adapter(torch.nn.Module):
    """The adapters of one linear layer, as a rank holds them. `forward` adds s·B·(A·x) to the layer's output.

    packing: the number of groups that a rank's rows of W consist of (heads of keys, else 1), and for every part its
    rows in each group and the number of its A: sections of one tensor have the same. None: the layer is row-parallel.
    group: the ranks that share the layer; None: it lies whole on each rank, as experts and projections to latents do.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        *,
        rank: int,
        scale: float,
        packing: Packing | None,
        group: ProcessGroup | None,
        sequence_parallel: bool,
    ) -> None:
        super().__init__()
        self.rank, self.scale, self.packing, self.group = rank, scale, packing, group
        self.sequence_parallel, self.enabled = sequence_parallel, True
        # Those of a row-parallel layer are one part.
        self.rows: Packing = packing or (1, [(len(weight), 0)])
        num_a = 1 if packing is None else 1 + max(number for _, number in packing[1])
        self.a = torch.nn.Parameter(weight.new_zeros(num_a * rank, weight.shape[1]))
        self.b = torch.nn.Parameter(weight.new_zeros(weight.shape[0], rank))
        split, axis = (self.a, 1) if packing is None else (self.b, 0)
        for each in (self.a, self.b):
            if group is not None and each is split:
                set_tensor_model_parallel_attributes(each, True, axis, 1)
            else:
                # Under sequence parallelism a rank sees a part of the tokens, so Megatron has to sum over ranks.
                each.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Add to the layer's output `out` what its input x [..., in] on this rank gives, in place; return it."""
        # Scaled where it has rank numbers per token: the output has many more.
        low = self.scale * F.linear(x, self.a)
        if self.packing is None:
            if self.group is not None and self.sequence_parallel:
                low = reduce_scatter_to_sequence_parallel_region(low, group=self.group)
            elif self.group is not None:
                low = reduce_from_tensor_model_parallel_region(low, group=self.group)
        elif self.group is not None and self.sequence_parallel:
            low = gather_from_sequence_parallel_region(low, group=self.group)
        elif self.group is not None:
            low = copy_to_tensor_model_parallel_region(low, group=self.group)
        added: torch.Tensor = _AddLowRank.apply(out, low, self.rows, [len(out)], self.b)
        return added


class ExpertAdapters(torch.nn.ModuleList):
    """The adapters of experts that are one linear layer. Each adds to its expert's tokens, which lie end to end."""

    enabled = True

    def forward(self, x: torch.Tensor, out: torch.Tensor, num_tokens: Sequence[int]) -> torch.Tensor:
        """Add to the output, in place, what the inputs [Σ tokens, in] give, of which each expert has `num_tokens`."""
        adapters = cast(list[Adapter], list(self))
        parts = zip(adapters, x.split(num_tokens), strict=True)
        low = torch.cat([each.scale * F.linear(own, each.a) for each, own in parts])
        added: torch.Tensor = _AddLowRank.apply(out, low, adapters[0].rows, num_tokens, *(each.b for each in adapters))
        return added


class _AddLowRank(torch.autograd.Function):
    """The autograd function (out [..., rows], low [..., rank numbers of every A], B) → out + B·low, written over `out`.

    A linear layer does not read its output in backward, so nothing of that size need be made. num_tokens: of each B, by
    the first axis.
    """

    @staticmethod
    def forward(
        ctx: Any, out: torch.Tensor, low: torch.Tensor, packing: Packing, num_tokens: Sequence[int], *bs: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(low, *bs)
        ctx.packing, ctx.num_tokens = packing, num_tokens
        for own, narrow, b in zip(out.detach().split(num_tokens), low.split(num_tokens), bs, strict=True):
            for target, x, part in _by_part(own, narrow, b, packing):
                if target.dim() == 2:
                    target.addmm_(x, part.t())
                else:
                    target.baddbmm_(x.expand(len(target), -1, -1), part.mT)
        # Were it `out` itself, it would be a view, which later layers may not write over. Writing through `detach` has
        # told autograd that `out` changed.
        return out.data

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[object, ...]:
        low, *bs = ctx.saved_tensors
        grad_low, grad_bs, grad_out = torch.zeros_like(low), [torch.empty_like(b) for b in bs], grad_out.contiguous()
        split = (each.split(ctx.num_tokens) for each in (grad_out, low, grad_low))
        for own, narrow, to_narrow, b, grad_b in zip(*split, bs, grad_bs, strict=True):
            targets = _by_part(own, to_narrow, grad_b, ctx.packing)
            for (grad, x, part), (_, to_low, to_b) in zip(_by_part(own, narrow, b, ctx.packing), targets, strict=True):
                # Few rows and many columns multiply faster than many rows and few columns.
                by_group = part.mT @ grad.mT
                to_low += (by_group if by_group.dim() == 2 else by_group.sum(0)).t()
                to_b.copy_((x.t() @ grad).mT)
        return grad_out, grad_low, None, None, *grad_bs


def _by_part(
    wide: torch.Tensor, low: torch.Tensor, b: torch.Tensor, packing: Packing
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield views for every part: of an output [groups, tokens, rows], of its A's numbers [tokens, rank], and of its B
    [groups, rows, rank]. One group is left out of shapes: products of matrices are faster than of batches with one.
    """
    (num_groups, parts), rank, start = packing, b.shape[1], 0
    wide = wide.view(-1, num_groups, len(b) // num_groups).transpose(0, 1)
    low, b = low.view(-1, low.shape[-1]), b.view(num_groups, -1, rank)
    if num_groups == 1:
        wide, b = wide[0], b[0]
    for rows, number in parts:
        columns = slice(start, start + rows)
        yield wide[..., columns], low[:, number * rank : (number + 1) * rank], b[..., columns, :]
        start += rows


def attach_adapters(chunks: Sequence[PackedModel], config: LoraConfig, seed: int) -> ModelSpec:
    """Add adapters to a rank's model chunks, freeze all else but a scalar head, and return their description.

    Raises:
        ConfigError: `config.path` has other adapters.
    """
    layout, adapters = chunks[0].layout, adapter_spec(chunks[0].spec, config)
    num_local = adapters.dims.dim("experts") // layout.config.ep
    first = layout.ep_group.rank() * num_local
    rules = adapters.parameter_rules(range(first, first + num_local))
    expert_rank = adapters.dims.dim("expert_rank")
    for chunk in chunks:
        chunk.requires_grad_(False)
        targets = [named for named in named_shards(chunk) if adapter_name(named[0], "a") in rules]
        for name, local_name, weight in targets:
            a, b = (rules[adapter_name(name, letter)].rule for letter in "ab")
            is_expert = "{expert}" in a.names[0]
            is_whole = is_expert or layout.config.tp == 1 or a.partition is b.partition is Partition.REPLICATED
            path, _, number = local_name.rpartition(".weight")
            linear = chunk.get_submodule(path)
            adapter = Adapter(
                weight,
                rank=expert_rank if is_expert else config.rank,
                scale=config.alpha / config.rank,
                packing=_packing(a, b, adapters.dims, layout.etp_group if is_expert else layout.tp_group),
                group=None if is_whole else layout.tp_group,
                sequence_parallel=chunk.config.sequence_parallel and not is_expert,
            )
            if not hasattr(linear, "lora"):
                linear.register_forward_hook(_add_adapter)
                linear.lora = ExpertAdapters() if number else adapter
            if number:
                linear.lora.append(adapter)
        if chunk.pre_process:
            # Layers that are computed again in backward have gradients only if their input needs some.
            chunk.embedding.register_forward_hook(
                lambda _, __, out: out.requires_grad_() if torch.is_grad_enabled() else out
            )
        if hasattr(chunk, "value_head"):
            chunk.value_head.requires_grad_(True)
    slices, shapes = adapter_slices(chunks, adapters), adapters.expected_tensors()
    if config.path is not None:
        scalar_head = isinstance(chunks[0], ValueModel)
        tensors = read_adapters(chunks[0].spec, config, scalar_head=scalar_head)
        load_slices(trained_slices(chunks, adapters), tensors, optional=(VALUE_HEAD,))
        return adapters
    with torch.no_grad():
        for part in slices:
            full = initial_tensor(part.tensor, shapes[part.tensor], seed)
            part.view.copy_(full[part.index].reshape(part.view.shape))
    return adapters


def _add_adapter(
    linear: torch.nn.Module, inputs: tuple[torch.Tensor, *tuple[Any, ...]], output: tuple[torch.Tensor, object]
) -> tuple[torch.Tensor, object]:
    (out, bias), adapter, (x, *num_tokens) = output, linear.lora, inputs
    assert isinstance(adapter, Adapter | ExpertAdapters)
    return (adapter(x, out, *num_tokens), bias) if adapter.enabled else output


def _packing(a: WeightRule, b: WeightRule, dims: Dims, tp: ProcessGroup) -> tuple[int, list[tuple[int, int]]] | None:
    """Return how a rank's rows of a weight are packed (see `Adapter`), given the rules of its adapter."""
    if a.partition is Partition.COLUMNS:
        return None
    groups, names = num_groups(b.partition, dims, tp.size()), list(dict.fromkeys(tensor.name for tensor in b.tensors))
    boxes = shard_boxes(b, dims, Split(tp.rank(), tp.size(), vocab_padding=1))
    rows = [(end - start) // groups for (start, end), *_ in boxes]
    return groups, [(num_rows, names.index(each.name)) for num_rows, each in zip(rows, b.tensors, strict=True)]


def adapter_slices(chunks: Sequence[PackedModel], adapters: ModelSpec) -> Iterator[Slice]:
    """Yield this rank's slices of the adapters' tensors, as views of live parameters."""
    shards = itertools.chain.from_iterable(named_shards(chunk, of_adapters=True) for chunk in chunks)
    return rank_slices([(name, parameter.data) for name, _, parameter in shards], adapters, chunks[0].layout)


def trained_slices(chunks: Sequence[PackedModel], adapters: ModelSpec) -> Iterator[Slice]:
    """Yield this rank's slices of all that is trained: the adapters' tensors, and a scalar head if there is one."""
    yield from adapter_slices(chunks, adapters)
    yield from (part for part in model_slices(chunks) if part.tensor == VALUE_HEAD)


def adapter_states(chunk: PackedModel, adapters: ModelSpec) -> dict[str, ShardedTensor | ShardedTensorFactory]:
    """Describe the shards of a chunk's adapters for checkpoints, by the parameters' names in the chunk.

    Keys are independent of the layout. Matrices stacked on each rank, such as gate and up, have keys of their own.
    """
    layout, states = chunk.layout, dict[str, ShardedTensor | ShardedTensorFactory]()
    num_local = adapters.dims.dim("experts") // layout.config.ep
    first = layout.ep_group.rank() * num_local
    rules = adapters.parameter_rules(range(first, first + num_local))
    for name, local_name, parameter in named_shards(chunk, of_adapters=True):
        placed, tp = rules[name], layout.tp_group
        replicas, partition = layout.replica_group, placed.rule.partition
        if placed.expert is not None:
            tp, replicas = layout.etp_group, layout.expert_replica_group
        key, is_whole = placed.name(placed.rule.names[0]), partition is Partition.REPLICATED
        replica = (0, tp.rank() if is_whole else 0, replicas.rank())
        offsets = () if is_whole else ((int(partition is Partition.COLUMNS), tp.rank(), tp.size()),)
        if partition is Partition.GATE_UP:
            boxes = shard_boxes(placed.rule, adapters.dims, Split(tp.rank(), tp.size(), vocab_padding=1))
            rows = [end - start for (start, end), *_ in boxes]
            build = functools.partial(_parts, rows=rows, offsets=offsets)
            states[local_name] = ShardedTensorFactory(key, parameter, build, torch.cat, replica)
        else:
            states[local_name] = ShardedTensor.from_rank_offsets(key, parameter, *offsets, replica_id=replica)
    return states


def _parts(
    key: str,
    stacked: torch.Tensor,
    replica: tuple[int, int, int],
    _: slice | None,
    *,
    rows: Sequence[int],
    offsets: Sequence[tuple[int, int, int]],
) -> list[ShardedTensor]:
    return [
        ShardedTensor.from_rank_offsets(f"{key}.{i}", part, *offsets, replica_id=replica)
        for i, part in enumerate(stacked.split(list(rows)))
    ]


@contextlib.contextmanager
def without_adapters(chunks: Sequence[PackedModel]) -> Iterator[None]:
    """Compute as the base model does, meanwhile."""
    found = [module for chunk in chunks for module in chunk.modules() if isinstance(module, Adapter | ExpertAdapters)]
    for each in found:
        each.enabled = False
    try:
        yield
    finally:
        for each in found:
            each.enabled = True
