"""Tensors of all experts of a layer and the parameters of single experts, element by element."""

from pathlib import Path

import pytest
import torch

from megarl.cluster.sync_plan import rank_holdings
from megarl.config.schema import LayoutConfig
from megarl.sync.plan.engine_shards import engine_needs
from megarl.weights.families import ModelSpec, read_model_spec
from megarl.weights.slices import ShardPosition, Slice, load_slices, shard_slices, store_slices
from tests.helpers.small_model import write_config

EXPERTS, HIDDEN, FFN = 4, 6, 4
LAYER, HF = "decoder.layers.0.mlp.experts.local_experts.{}.", "model.layers.0.mlp.experts."


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    return read_model_spec(
        write_config(
            tmp_path,
            architectures=["GptOssForCausalLM"],
            num_hidden_layers=1,
            hidden_size=HIDDEN,
            intermediate_size=FFN,
            num_local_experts=EXPERTS,
            num_experts_per_tok=2,
            attention_bias=True,
            rms_norm_eps=1e-5,
        )
    )


def full_tensors(spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Those of experts, with numbers that say which element it is."""
    shapes = {name: shape for name, shape in spec.expected_tensors().items() if name.startswith(HF)}
    return {name: torch.arange(torch.Size(shape).numel()).float().view(shape) for name, shape in shapes.items()}


def parameters(first: int, count: int, etp: int = 1) -> list[tuple[str, torch.Tensor]]:
    """Empty parameters of a rank's experts; names number them from 0."""
    shapes = {
        "linear_fc1.weight": (2 * FFN // etp, HIDDEN),
        "linear_fc1.bias": (2 * FFN // etp,),
        "linear_fc2.weight": (HIDDEN, FFN // etp),
        "linear_fc2.bias": (HIDDEN,),
    }
    return [(LAYER.format(i) + name, torch.zeros(shape)) for i in range(count) for name, shape in shapes.items()]


def position(**changes: int) -> ShardPosition:
    return ShardPosition(**{"tp_rank": 0, "tp_size": 1, "replica": 0, "num_replicas": 1, **changes})


def test_gates_and_ups_take_turns(spec: ModelSpec) -> None:
    """On the second of two expert-parallel ranks: experts 2 and 3."""
    full, mine = full_tensors(spec), parameters(2, 2)
    load_slices(shard_slices(mine, spec, position(), position(ep_rank=1, ep_size=2)), full)
    held = dict(mine)
    for i, expert in enumerate((2, 3)):
        fc1, bias = held[LAYER.format(i) + "linear_fc1.weight"], held[LAYER.format(i) + "linear_fc1.bias"]
        for feature in range(FFN):
            gate, up = 2 * feature, 2 * feature + 1
            assert fc1[feature].tolist() == full[f"{HF}gate_up_proj"][expert, :, gate].tolist()
            assert fc1[FFN + feature].tolist() == full[f"{HF}gate_up_proj"][expert, :, up].tolist()
            assert (bias[feature], bias[FFN + feature]) == tuple(full[f"{HF}gate_up_proj_bias"][expert, gate : up + 1])
        assert torch.equal(held[LAYER.format(i) + "linear_fc2.weight"], full[f"{HF}down_proj"][expert].T)
        assert torch.equal(held[LAYER.format(i) + "linear_fc2.bias"], full[f"{HF}down_proj_bias"][expert])


@pytest.mark.parametrize(("ep", "etp"), [(2, 1), (2, 2)])
def test_all_ranks_together_write_what_they_read(spec: ModelSpec, ep: int, etp: int) -> None:
    full = full_tensors(spec)
    written = {name: torch.full_like(tensor, torch.nan) for name, tensor in full.items()}
    for ep_rank in range(ep):
        for etp_rank in range(etp):
            mine, at = parameters(0, EXPERTS // ep, etp), position(tp_rank=etp_rank, tp_size=etp)
            at = position(tp_rank=etp_rank, tp_size=etp, ep_rank=ep_rank, ep_size=ep)
            load_slices(shard_slices(mine, spec, position(), at), full)
            store_slices(shard_slices(mine, spec, position(), at), written)
    for name, tensor in full.items():
        assert torch.equal(written[name], tensor), name


def test_engines_take_each_expert_by_its_own_name(spec: ModelSpec) -> None:
    mine, at = parameters(0, 2), position(ep_rank=1, ep_size=2)
    together, apart = (list(shard_slices(mine, spec, position(), at, by_expert=each)) for each in (False, True))
    kinds = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
    assert [part.tensor for part in together] == [f"{HF}{kind}" for _ in (2, 3) for kind in kinds]
    assert [part.tensor for part in apart] == [f"{HF}{expert}.{kind}" for expert in (2, 3) for kind in kinds]

    def is_same(stacked: Slice, own: Slice, expert: int) -> bool:
        return stacked.index == (slice(expert, expert + 1), *own.index) and torch.equal(stacked.view, own.view)

    assert all(is_same(*pair, 2 + i // 4) for i, pair in enumerate(zip(together, apart, strict=True)))


@pytest.fixture
def sections(tmp_path: Path) -> ModelSpec:
    """A model whose tensor of gates and ups has four rows of a gate, then four of an up, for each of four experts."""
    sizes = {"num_hidden_layers": 1, "hidden_size": HIDDEN, "intermediate_size": FFN, "num_local_experts": EXPERTS}
    architectures = ["GraniteMoeForCausalLM"]
    return read_model_spec(write_config(tmp_path, architectures=architectures, **sizes, num_experts_per_tok=2))


GATE_UP, OWN = "model.layers.0.block_sparse_moe.input_linear.weight", "model.layers.0.block_sparse_moe.experts.{}."


def test_sections_of_all_experts(sections: ModelSpec) -> None:
    """On the second of two ranks that share each expert: rows 2 and 3 of gates, 6 and 7 of gates and ups."""
    shape = sections.expected_tensors()[GATE_UP]
    assert shape == (EXPERTS, 2 * FFN, HIDDEN)
    full = {GATE_UP: torch.arange(torch.Size(shape).numel()).float().view(shape)}
    mine = [(f"{LAYER.format(1)}linear_fc1.weight", torch.zeros(FFN, HIDDEN))]
    at = position(tp_rank=1, tp_size=2)
    load_slices(shard_slices(mine, sections, at, at), full)
    assert torch.equal(mine[0][1], full[GATE_UP][1, [2, 3, 6, 7]])
    apart = list(shard_slices(mine, sections, at, at, by_expert=True))
    rows = (slice(2, 4), slice(0, HIDDEN))
    assert [(part.tensor, part.index) for part in apart] == [
        (f"{OWN.format(1)}gate_proj.weight", rows),
        (f"{OWN.format(1)}up_proj.weight", rows),
    ]


def test_engines_and_ranks_agree_on_sections(sections: ModelSpec) -> None:
    expected = sections.expected_tensors(by_expert=True)
    assert GATE_UP not in expected
    assert expected[f"{OWN.format(3)}gate_proj.weight"] == expected[f"{OWN.format(3)}up_proj.weight"] == (FFN, HIDDEN)
    held = rank_holdings(sections, LayoutConfig(tp=2, dp=2, ep=2, etp=2), vocab_multiple=1)
    needs = engine_needs(sections, 2)
    for rank in range(4):
        for expert in range(EXPERTS):
            own = held[rank].get(f"{OWN.format(expert)}up_proj.weight")
            first = FFN // 2 * (rank % 2)
            assert own == ((((first, first + 2), (0, HIDDEN)),) if expert // 2 == rank // 2 else None)
    assert needs[1][f"{OWN.format(0)}up_proj.weight"] == (((2, 4), (0, HIDDEN)),)
    assert needs[1][f"{OWN.format(0)}down_proj.weight"] == (((0, HIDDEN), (2, 4)),)
