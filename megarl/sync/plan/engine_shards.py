"""Which box of each Hugging Face tensor a worker of a tensor-parallel vLLM engine needs: vLLM's layout, computed."""

from dataclasses import dataclass

from megarl.weights.boxes import Box
from megarl.weights.families import ModelSpec
from megarl.weights.slices import Split, split_box
from megarl.weights.tables import Partition

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


def engine_shards(spec: ModelSpec, at: EnginePosition) -> dict[str, Box]:
    """Tensor → box, for every tensor of which a worker needs anything.

    Norms and routers are whole, q, k, v, gate and up split by output features, o and down by input features, the
    vocabulary by rows after padding; key and value heads repeat where there are fewer than workers.
    """
    expected, split = spec.expected_tensors(), Split(at.rank, at.size, VOCAB_PADDING)
    shards = {}
    for placed in spec.rules():
        if spec.is_copy(placed.rule) or not at.holds_expert(placed.expert, spec.dims.dim("experts")):
            continue
        whole = placed.expert is not None and at.expert_parallel
        partition = Partition.REPLICATED if whole else placed.rule.partition
        for part, tensor in enumerate(placed.rule.tensors):
            name = placed.name(tensor.name)
            if name in expected:
                shards[name] = split_box(partition, expected[name], part, spec.dims, split)
    return shards
