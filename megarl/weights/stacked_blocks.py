"""Define weight rules of parts whose checkpoints have one tensor for all experts of a layer, and of attention sinks."""

from megarl.weights.rules import HFTensor, Layers, Partition, WeightRule

_L, _HF = "decoder.layers.{layer}.", "model.layers.{layer}."
_LOCAL, _GROUPED = f"{_L}mlp.experts.local_experts.{{expert}}.", f"{_L}mlp.experts."
_EXPERTS = f"{_HF}mlp.experts."

SINKS = (
    WeightRule(
        names=(f"{_L}self_attention.core_attention.softmax_offset",),
        partition=Partition.ROWS,
        tensors=(HFTensor(f"{_HF}self_attn.sinks", ("heads",)),),
    ),
)

OUTPUT_BIAS = (
    WeightRule(
        names=(f"{_L}self_attention.linear_proj.bias",),
        partition=Partition.REPLICATED,
        tensors=(HFTensor(f"{_HF}self_attn.o_proj.bias", ("hidden",)),),
    ),
)


def _of_experts(partition: Partition, parameter: str, *tensors: HFTensor) -> WeightRule:
    return WeightRule(
        names=(f"{_LOCAL}{parameter}", f"{_GROUPED}{parameter}{{expert}}"),
        partition=partition,
        tensors=tensors,
        layers=Layers.EXPERTS,
    )


def _turned(tensor: str, *shape: str) -> HFTensor:
    return HFTensor(f"{_EXPERTS}{tensor}", shape, of_expert=f"{_EXPERTS}{{expert}}.{tensor}")


# Experts with biases, in tensors of all experts of a layer; their router has a bias too.
BIASED_EXPERTS = (
    *(
        WeightRule(
            names=(f"{_L}mlp.router.{kind}",),
            partition=Partition.REPLICATED,
            tensors=(HFTensor(f"{_HF}mlp.router.{kind}", shape),),
            layers=Layers.EXPERTS,
        )
        for kind, shape in (("weight", ("experts", "hidden")), ("bias", ("experts",)))
    ),
    _of_experts(Partition.GATE_UP_IN_TURNS, "linear_fc1.weight", _turned("gate_up_proj", "hidden", "expert_gate_up")),
    _of_experts(Partition.GATE_UP_IN_TURNS, "linear_fc1.bias", _turned("gate_up_proj_bias", "expert_gate_up")),
    _of_experts(Partition.TRANSPOSED_COLUMNS, "linear_fc2.weight", _turned("down_proj", "expert_ffn", "hidden")),
    _of_experts(Partition.REPLICATED, "linear_fc2.bias", _turned("down_proj_bias", "hidden")),
)


def _fused_experts(
    block: str, router: str, gate_up: str, down: str, *, is_transposed: bool = False
) -> tuple[WeightRule, ...]:
    """Return the weight rules of router and experts in tensors of all experts of a layer, of which one has gates and
    ups as sections, given the checkpoint's names of the block and its tensors. is_transposed: as in `HFTensor`.
    """
    rows, columns = ("expert_ffn", "hidden"), ("hidden", "expert_ffn")
    gate_up, down = f"{_HF}{block}.{gate_up}", f"{_HF}{block}.{down}"
    gate_of_one, up_of_one, down_of_one = (
        f"{_HF}{block}.experts.{{expert}}.{name}_proj.weight" for name in ("gate", "up", "down")
    )
    return (
        WeightRule(
            names=(f"{_L}mlp.router.weight",),
            partition=Partition.REPLICATED,
            tensors=(HFTensor(f"{_HF}{block}.{router}", ("experts", "hidden")),),
            layers=Layers.EXPERTS,
        ),
        _of_experts(
            Partition.GATE_UP,
            "linear_fc1.weight",
            *(HFTensor(gate_up, rows, of_expert=one, is_transposed=is_transposed) for one in (gate_of_one, up_of_one)),
        ),
        _of_experts(
            Partition.COLUMNS,
            "linear_fc2.weight",
            HFTensor(down, columns, of_expert=down_of_one, is_transposed=is_transposed),
        ),
    )


SPARSE_EXPERTS = _fused_experts(
    "block_sparse_moe", "router.layer.weight", gate_up="input_linear.weight", down="output_linear.weight"
)
# Engines take both matrices of the first, and every expert, by a name of its own.
STACKED_EXPERTS, TRANSPOSED_EXPERTS = (
    _fused_experts(
        "mlp", "gate.weight", gate_up="experts.gate_up_proj", down="experts.down_proj", is_transposed=is_transposed
    )
    for is_transposed in (False, True)
)
