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


def _of_experts(partition: Partition, parameter: str, tensor: str, shape: str) -> WeightRule:
    return WeightRule(
        names=(f"{_LOCAL}{parameter}", f"{_GROUPED}{parameter}{{expert}}"),
        partition=partition,
        tensors=(HFTensor(f"{_EXPERTS}{tensor}", tuple(shape.split()), of_expert=f"{_EXPERTS}{{expert}}.{tensor}"),),
        layers=Layers.EXPERTS,
    )


# Experts without biases, in tensors of all experts of a layer; of the first, gates come before what they multiply.
# Engines take both matrices, and every expert, by a name of its own.
STACKED_EXPERTS = (
    WeightRule(
        names=(f"{_L}mlp.router.weight",),
        partition=Partition.REPLICATED,
        tensors=(HFTensor(f"{_HF}mlp.gate.weight", ("experts", "hidden")),),
        layers=Layers.EXPERTS,
    ),
    WeightRule(
        names=(_LOCAL + "linear_fc1.weight", _GROUPED + "linear_fc1.weight{expert}"),
        partition=Partition.GATE_UP,
        tensors=tuple(
            HFTensor(f"{_EXPERTS}gate_up_proj", ("expert_ffn", "hidden"), f"{_EXPERTS}{{expert}}.{kind}_proj.weight")
            for kind in ("gate", "up")
        ),
        layers=Layers.EXPERTS,
    ),
    WeightRule(
        names=(_LOCAL + "linear_fc2.weight", _GROUPED + "linear_fc2.weight{expert}"),
        partition=Partition.COLUMNS,
        tensors=(HFTensor(f"{_EXPERTS}down_proj", ("hidden", "expert_ffn"), f"{_EXPERTS}{{expert}}.down_proj.weight"),),
        layers=Layers.EXPERTS,
    ),
)

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
    _of_experts(Partition.GATE_UP_IN_TURNS, "linear_fc1.weight", "gate_up_proj", "hidden expert_gate_up"),
    _of_experts(Partition.GATE_UP_IN_TURNS, "linear_fc1.bias", "gate_up_proj_bias", "expert_gate_up"),
    _of_experts(Partition.TRANSPOSED_COLUMNS, "linear_fc2.weight", "down_proj", "expert_ffn hidden"),
    _of_experts(Partition.REPLICATED, "linear_fc2.bias", "down_proj_bias", "hidden"),
)
