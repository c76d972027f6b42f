"""Map rows of Hugging Face tensors to rows of Megatron's global tensors, by the model family's weight table.

The map is the shard layout (`shard_slices`) of a single rank: its shards are whole parameters. If all layers are of one
kind, torch_dist stacks them into one global tensor per parameter, whose first axis counts the layers. The experts of a
layer are stacked along another axis.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megarl.weights.families import ModelSpec, PlacedRule
from megarl.weights.slices import ShardPosition, Slice, is_turned, shard_slices
from megarl.weights.tables import Partition, WeightRule

_WHOLE = ShardPosition(tp_rank=0, tp_size=1, replica=0, num_replicas=1)
# Norms that Transformer Engine fuses with a linear layer. Megatron's own layers also write them under the fused name,
# except those of latent attention.
_UNDER_OTHER_NAME = (".input_layernorm.weight", ".pre_mlp_layernorm.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBlock:
    """Rows that a parameter and a Hugging Face tensor share: `num_rows` from `row` and from `tensor_row` on.

    of_expert: the whole parameter is that one row of the tensor, which has all experts of its layer, in the order of
    `weights.slices.turned`.
    """

    row: int
    tensor: str
    tensor_row: int
    num_rows: int
    of_expert: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A Megatron parameter before sharding, as a distributed checkpoint stores it: layers (and experts) stacked in one
    tensor.

    key: the name of the stacked tensor. stack: its leading axes, such as (layers, experts). place: the index of this
    parameter along those axes. shape: without those axes, with vocabulary padding; padding rows are in no block.
    other_key: the key in the other implementation of the layer (Transformer Engine's or Megatron's own).
    """

    key: str
    other_key: str
    place: tuple[int, ...]
    stack: tuple[int, ...]
    shape: tuple[int, ...]
    rule: WeightRule
    blocks: tuple[RowBlock, ...]

    @property
    def global_shape(self) -> tuple[int, ...]:
        return self.stack + self.shape


def model_parameters(spec: ModelSpec, *, scalar_head: bool, vocab_multiple: int, stacked: bool) -> list[Parameter]:
    """List the Megatron parameters that a checkpoint of the model stores. Tied copies of embeddings are not stored."""
    expected = spec.expected_tensors(scalar_head=scalar_head)
    kept = [
        placed
        for placed in spec.rules()
        if not spec.is_copy(placed.rule) and placed.name(placed.rule.tensors[0].name) in expected
    ]
    blocks = _blocks_by_parameter(spec, kept, vocab_multiple)
    parameters = []
    for placed in kept:
        # The parameter's names in checkpoints, first the one that Megatron's own layers write.
        names = placed.rule.names
        if spec.dims.latent is None and names[0].endswith(_UNDER_OTHER_NAME):
            names = names[::-1]
        # (place, size) on each axis that the parameter is stacked on.
        axes = []
        if placed.layer is not None and stacked:
            axes.append((placed.layer, spec.dims.num_layers))
        if placed.expert is not None:
            axes.append((placed.expert, spec.dims.dim("experts")))
        parameters.append(
            Parameter(
                key=_dist_key(placed, names[0], stacked=stacked),
                other_key=_dist_key(placed, names[-1], stacked=stacked),
                place=tuple(number for number, _ in axes),
                stack=tuple(size for _, size in axes),
                shape=_whole_shape(spec, placed, vocab_multiple),
                rule=placed.rule,
                blocks=tuple(blocks[placed.name(placed.rule.names[-1])]),
            )
        )
    return parameters


def _dist_key(placed: PlacedRule, name: str, *, stacked: bool) -> str:
    """Return a parameter's key in a torch_dist checkpoint, without expert number, and without layer if `stacked`."""
    if placed.expert is not None:
        name = placed.rule.names[0].replace(".local_experts.{expert}.", ".experts.")
    return placed.name(name.replace(".{layer}.", ".") if stacked else name)


def extra_state_keys(parameters: Sequence[Parameter]) -> list[str]:
    """List the keys of the empty `_extra_state` objects that Megatron's parallel linear layers store beside weights."""
    keys: dict[str, None] = {}
    for parameter in parameters:
        *module, kind = parameter.key.split(".")
        is_linear = kind == "weight" and len(parameter.shape) > 1
        if is_linear and parameter.rule.partition not in (Partition.REPLICATED, Partition.VOCAB):
            place, stack = parameter.place or (0,), parameter.stack or (1,)
            shard = f"shard_{'.'.join(map(str, place))}_{'.'.join(map(str, stack))}"
            keys[f"{'.'.join(module)}._extra_state/{shard}"] = None
    return list(keys)


def _whole_shape(spec: ModelSpec, placed: PlacedRule, vocab_multiple: int) -> tuple[int, ...]:
    """Return the unsharded shape of a Megatron parameter, which concatenates Hugging Face tensors along the rows."""
    rule, dim = placed.rule, spec.dims.dim
    rows = sum(dim(tensor.shape[0]) for tensor in rule.tensors)
    if rule.partition is Partition.VOCAB:
        rows = -(-rows // vocab_multiple) * vocab_multiple
    shape = (rows, *(dim(symbol) for symbol in rule.tensors[0].shape[1:]))
    return shape[::-1] if is_turned(rule.partition) else shape


def _blocks_by_parameter(spec: ModelSpec, kept: Sequence[PlacedRule], vocab_multiple: int) -> dict[str, list[RowBlock]]:
    """Return parameter name → its blocks of rows, each taken from a Hugging Face tensor, in the order of its rows."""
    blocks: dict[str, list[RowBlock]] = {}
    taken: list[tuple[list[RowBlock], PlacedRule, tuple[int, ...]]] = []

    def shards() -> Iterator[tuple[str, torch.Tensor]]:
        for placed in kept:
            name, shape = placed.name(placed.rule.names[-1]), _whole_shape(spec, placed, vocab_multiple)
            taken[:] = [(blocks.setdefault(name, []), placed, shape)]
            yield name, torch.empty(shape, device="meta")

    # Slices come parameter by parameter, so the current slice belongs to the parameter that was taken last.
    for part in shard_slices(shards(), spec, _WHOLE):
        found, placed, shape = taken[0]
        if is_turned(placed.rule.partition) or placed.rule.tensors[0].is_transposed:
            # Sections of the tensor are slices of their own, and one block.
            expert = part.index[0].start
            found[:] = [RowBlock(row=0, tensor=part.tensor, tensor_row=expert, num_rows=shape[0], of_expert=True)]
            continue
        first = part.index[0].start
        if placed.rule.tensors[0].of_expert is not None:
            first = first * shape[0] + part.index[1].start
        found.extend(row_blocks(part, math.prod(shape[1:]), first))
    return {name: sorted(found, key=lambda block: block.row) for name, found in blocks.items()}


def row_blocks(part: Slice, row_size: int, first: int) -> Iterator[RowBlock]:
    """Split one slice of a Hugging Face tensor, at its place in a Megatron parameter, into blocks of rows of
    `row_size`. first: the first of its rows in the tensor.

    Raises:
        ValueError: the slice does not begin and end with whole rows, so it cannot be converted row by row.
    """
    view, inner = part.view, 1
    axes = list(zip(view.shape, view.stride(), strict=True))
    while axes and (axes[-1][1] == inner or axes[-1][0] == 1):
        inner *= axes.pop()[0]
    steps = [stride for _, stride in axes]
    if any(size % row_size for size in (inner, view.storage_offset(), *steps)):
        raise ValueError(f"{part.tensor}: its place in Megatron's parameter is not made of whole rows")
    num_rows = inner // row_size
    for number, at in enumerate(itertools.product(*(range(size) for size, _ in axes))):
        start = view.storage_offset() + sum(i * step for i, step in zip(at, steps, strict=True))
        yield RowBlock(
            row=start // row_size,
            tensor=part.tensor,
            tensor_row=first + number * num_rows,
            num_rows=num_rows,
        )
