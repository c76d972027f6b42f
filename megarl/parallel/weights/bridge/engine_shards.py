"""Which box of each Hugging Face tensor a worker of a tensor-parallel vLLM engine needs: vLLM's layout, computed."""

from collections.abc import Callable
from dataclasses import dataclass

from megarl.parallel.weights.bridge.boxes import Box, full_box
from megarl.parallel.weights.families import Dims, ModelSpec
from megarl.parallel.weights.tables import Partition

# vLLM pads the vocabulary to a multiple of this, then splits it (DEFAULT_VOCAB_PADDING_SIZE).
VOCAB_PADDING = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePosition:
    """A worker's place in its engine. `expert_parallel`: the engine splits experts whole, not each by its width."""

    rank: int
    size: int
    expert_parallel: bool = False

    def holds_expert(self, expert: int | None, num_experts: int) -> bool:
        """Whether a worker has anything of an expert; the first workers take one more where experts do not divide."""
        if expert is None or not self.expert_parallel:
            return True
        count, more = divmod(num_experts, self.size)
        start = self.rank * count + min(self.rank, more)
        return start <= expert < start + count + (self.rank < more)


# (shape of the tensor, its place in the rule, sizes, worker) → box
_Sharder = Callable[[tuple[int, ...], int, Dims, EnginePosition], Box]


def engine_shards(spec: ModelSpec, at: EnginePosition) -> dict[str, Box]:
    """Tensor → box, for every tensor of which a worker needs anything.

    Norms and routers are whole, q, k, v, gate and up split by output features, o and down by input features, the
    vocabulary by rows after padding; key and value heads repeat where there are fewer than workers.
    """
    expected = spec.expected_tensors()
    shards = {}
    for placed in spec.rules():
        if spec.is_copy(placed.rule) or not at.holds_expert(placed.expert, spec.dims.dim("experts")):
            continue
        whole = placed.expert is not None and at.expert_parallel
        shard = _whole if whole else _SHARDERS[placed.rule.partition]
        for part, tensor in enumerate(placed.rule.tensors):
            name = placed.name(tensor.name)
            if name in expected:
                shards[name] = shard(expected[name], part, spec.dims, at)
    return shards


def _whole(shape: tuple[int, ...], part: int, dims: Dims, at: EnginePosition) -> Box:
    return full_box(shape)


def _vocab(shape: tuple[int, ...], part: int, dims: Dims, at: EnginePosition) -> Box:
    rows, *others = shape
    padded = -(-rows // VOCAB_PADDING) * VOCAB_PADDING
    start, end = (min(rows, padded * rank // at.size) for rank in (at.rank, at.rank + 1))
    return ((start, end), *full_box(others))


def _rows(shape: tuple[int, ...], part: int, dims: Dims, at: EnginePosition) -> Box:
    rows, *others = shape
    return (_block(at.rank, at.size, rows), *full_box(others))


def _columns(shape: tuple[int, ...], part: int, dims: Dims, at: EnginePosition) -> Box:
    return ((0, shape[0]), _block(at.rank, at.size, shape[1]))


def _qkv(shape: tuple[int, ...], part: int, dims: Dims, at: EnginePosition) -> Box:
    rows, *others = shape
    # The first tensor of the rule has the query heads.
    heads = dims.num_heads if part == 0 else dims.num_kv_heads
    shards = min(heads, at.size)
    return (_block(at.rank * shards // at.size, shards, rows), *full_box(others))


def _block(rank: int, size: int, length: int) -> tuple[int, int]:
    return length * rank // size, length * (rank + 1) // size


_SHARDERS: dict[Partition, _Sharder] = {
    Partition.REPLICATED: _whole,
    Partition.VOCAB: _vocab,
    Partition.ROWS: _rows,
    Partition.COLUMNS: _columns,
    Partition.GATE_UP: _rows,
    Partition.QKV: _qkv,
}
