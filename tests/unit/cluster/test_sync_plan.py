"""What ranks hold by arithmetic: as their parameters say, and as many elements as are counted elsewhere."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.cluster.sync_plan import PlanInput, bridge_plan, engine_ranks, gloo_warning, plan_input_of, rank_holdings
from megarl.config.generation import SyncConfig
from megarl.config.load import from_dict
from megarl.config.schema import Config, LayoutConfig
from megarl.host.device.platform import PLATFORMS
from megarl.sync.plan.build import Plan, WeightMessage, build_plan
from megarl.sync.plan.engine_shards import engine_needs
from megarl.sync.transport.ends import holding_of
from megarl.weights.boxes import contains, num_elements, slices_of
from megarl.weights.families import ModelSpec, read_model_spec
from megarl.weights.safetensors_map import TensorSpec
from megarl.weights.shards import num_stage_parameters, padded_vocab
from tests.helpers.boxes import covered, received_bytes
from tests.helpers.small_model import write_config
from tests.unit.plan.test_experts import EXPERTS
from tests.unit.weights.test_slices import make_spec, rank_slices

LAYOUTS = [
    LayoutConfig(),
    LayoutConfig(tp=2, dp=2),
    LayoutConfig(pp=2),
    LayoutConfig(pp=2, virtual_pp=2),
    LayoutConfig(tp=2, pp=2, dp=2),
    LayoutConfig(pp=2, first_stage_layers=1),
    LayoutConfig(pp=2, pipeline_layout="Ettt|tL"),
]


@pytest.mark.parametrize(
    ("tp", "dp", "fused", "tied"), [(1, 1, False, True), (2, 1, True, False), (4, 2, False, False), (8, 1, True, True)]
)
def test_ranks_hold_what_their_parameters_say(tp: int, dp: int, fused: bool, tied: bool) -> None:
    """These parameters have 16 rows of vocabulary."""
    spec = make_spec(tied=tied, fused=fused)
    held = rank_holdings(spec, LayoutConfig(tp=tp, dp=dp), vocab_multiple=16 // tp)
    shapes = spec.expected_tensors()
    seen = [holding_of(slices, shapes) for slices in rank_slices(tp, dp, tied=tied, fused=fused)]
    # A rank without a word of the vocabulary has no slice of it.
    assert [{name: boxes for name, boxes in rank.items() if boxes} for rank in held] == seen


def experts_of(path: Path) -> ModelSpec:
    return read_model_spec(write_config(path, **EXPERTS))


@pytest.mark.parametrize("layout", [*LAYOUTS, LayoutConfig(dp=2, ep=2), LayoutConfig(tp=2, dp=2, ep=2, etp=2)])
@pytest.mark.parametrize("tied", [True, False])
def test_as_many_elements_as_are_counted(layout: LayoutConfig, tied: bool, tmp_path: Path) -> None:
    """A vocabulary of 10 divides without padding."""
    spec = read_model_spec(write_config(tmp_path, **EXPERTS, tie_word_embeddings=tied))
    held = rank_holdings(spec, layout, vocab_multiple=1)
    missing = padded_vocab(spec.dims.vocab, layout, 1) - spec.dims.vocab
    assert missing == 0
    for rank, holding in enumerate(held):
        stage = rank // layout.stage_size
        counted = num_stage_parameters(spec, layout, stage, vocab_multiple=1).total
        assert sum(num_elements(box) for boxes in holding.values() for box in boxes) == counted


def test_experts_lie_in_blocks_of_ranks(tmp_path: Path) -> None:
    """Ranks count etp fastest, then ep: of six experts ranks 0 and 1 share 0 to 2, ranks 2 and 3 share 3 to 5."""
    held = rank_holdings(experts_of(tmp_path), LayoutConfig(tp=2, dp=2, ep=2, etp=2), vocab_multiple=1)
    gate = "model.layers.0.mlp.experts.{}.gate_proj.weight"
    blocks, widths = [(0, 1, 2), (3, 4, 5)], [(0, 5), (5, 10)]
    for rank, (experts, rows) in enumerate(itertools.product(blocks, widths)):
        for expert in range(6):
            assert held[rank].get(gate.format(expert)) == (((rows, (0, 8)),) if expert in experts else None)


@pytest.mark.parametrize(("engine_tp", "fused"), [(1, True), (2, False), (4, True), (8, False)])
def test_engines_of_any_size_get_whole_heads_from_ranks_with_parts_of_groups(engine_tp: int, fused: bool) -> None:
    """Eight ranks share four groups of heads, of which engines repeat key and value heads."""
    spec = make_spec(tied=False, fused=fused)
    shapes = spec.expected_tensors()
    held = dict(enumerate(rank_holdings(spec, LayoutConfig(tp=8), vocab_multiple=2)))
    needed = dict(enumerate(engine_needs(spec, engine_tp), start=8))
    specs = {name: TensorSpec(shape=shape, dtype=torch.float32) for name, shape in shapes.items()}
    plan = build_plan(specs, held, needed)
    for receiver, boxes in needed.items():
        copies = {name: torch.zeros(shape) for name, shape in shapes.items()}
        for message in plan.of_receiver(receiver):
            for part in message.parts:
                assert any(contains(box, part.box) for box in held[message.source][part.tensor])
                copies[part.tensor][slices_of(part.box)] += 1
        for name, its in boxes.items():
            assert copies[name].numpy().tolist() == covered(shapes[name], its).astype(float).tolist(), name


def input_of(config: Config, spec: ModelSpec) -> PlanInput:
    return plan_input_of(spec, config.model, config.actor, config.rollout.engine, config.sync)


def slots_of(path: Path, layout: dict[str, int], *, num_nodes: int = 1, **engine: int) -> list[tuple[int, ...]]:
    spec = read_model_spec(write_config(path, num_key_value_heads=4))
    tree = {
        "actor": {"layout": layout},
        "rollout": {"engine": engine},
        "placement": {"trainer": {"num_nodes": num_nodes}},
    }
    config = from_dict(Config, tree)
    return engine_ranks(input_of(config, spec), config.rollout.engine, config.placement.trainer)


@pytest.mark.parametrize(("dp", "num_nodes", "nodes"), [(1, 1, [{0, 1, 2, 3}]), (2, 2, [{0, 1, 2, 3}, {4, 5, 6, 7}])])
def test_workers_sit_where_their_halves_are(dp: int, num_nodes: int, nodes: list[set[int]], tmp_path: Path) -> None:
    """Quarters 0 and 1 are the first half. In order the second engine's first worker would hold nothing it needs."""
    slots = slots_of(tmp_path, {"tp": 4, "dp": dp}, num_nodes=num_nodes, num_engines=2 * dp, tp=2)
    assert [{rank for engine in slots[2 * i : 2 * i + 2] for rank in engine} for i in range(num_nodes)] == nodes
    assert all((first % 4 in (0, 1), second % 4 in (2, 3)) == (True, True) for first, second in slots)


def test_an_engine_over_nodes_stays_on_them_and_is_cut_as_the_trainer(tmp_path: Path) -> None:
    """Two stages of two workers over two nodes of two devices: every worker's tensors are on its own device."""
    model = write_config(tmp_path / "untied", num_key_value_heads=4, tie_word_embeddings=False)
    tree: dict[str, Any] = {
        "model": {"vocab_multiple": 64},
        "actor": {"layout": {"tp": 2, "pp": 2}},
        "rollout": {"engine": {"tp": 2, "pp": 2}},
        "placement": {"trainer": {"num_nodes": 2}},
    }
    config, spec = from_dict(Config, tree), read_model_spec(model)
    assert engine_ranks(input_of(config, spec), config.rollout.engine, config.placement.trainer) == [(0, 1, 2, 3)]
    plan = bridge_plan(input_of(config, spec), config.rollout.engine, config.placement)
    assert sum(received_bytes(plan, receiver) for receiver in plan.needs) == 0
    assert sum(received_bytes(plan, receiver, local=True) for receiver in plan.needs) > 0
    # Without stages in the trainer, each node's first rank lends its device to the worker that has its slices.
    layout = {"layout": {"tp": 2, "dp": 2}}
    config = from_dict(Config, tree | {"actor": layout})
    assert engine_ranks(input_of(config, spec), config.rollout.engine, config.placement.trainer) == [(0, 1, 2, 3)]
    plan = bridge_plan(input_of(config, spec), config.rollout.engine, config.placement)
    assert sum(received_bytes(plan, receiver) for receiver in plan.needs) == 0


def test_gloo_between_hosts_with_cuda_has_its_price() -> None:
    """Two hosts; the second one gets 441 GB from the first, at 5 GB/s, which gets 10 GB; what stays on a host is not
    counted.
    """
    sizes = {(0, 3): 241 * 10**9, (0, 4): 200 * 10**9, (1, 2): 10 * 10**9, (1, 3): 900 * 10**9}
    messages = tuple(
        WeightMessage(0, 0, source, receiver, False, (), size) for (source, receiver), size in sizes.items()
    )
    plan = Plan(specs={}, needs={}, messages=messages, hosts={0: "a", 2: "a", 1: "b", 3: "b", 4: "b"})
    asked, cuda = SyncConfig(host_group="gloo"), PLATFORMS["cuda"]()
    assert gloo_warning(plan, asked, cuda) == (
        "sync.host_group: got gloo, which sends 441.0 GB per sync to or from one host over TCP from pageable "
        "memory: about 88.2 s; set it to device, or to null"
    )
    for settings in (SyncConfig(), SyncConfig(host_group="device"), SyncConfig(host_group="gloo", delta=True)):
        assert gloo_warning(plan, settings, cuda) is None
    assert gloo_warning(plan, asked, PLATFORMS["cpu"]()) is None
    near = Plan(specs={}, needs={}, messages=messages[3:], hosts=plan.hosts)
    assert gloo_warning(near, asked, cuda) is None


@pytest.mark.parametrize(("layout", "num_engines"), [({"tp": 2, "dp": 2}, 2), ({"tp": 2, "pp": 2}, 2), ({"pp": 2}, 1)])
def test_workers_sit_in_order_where_nothing_is_better(layout: dict[str, int], num_engines: int, tmp_path: Path) -> None:
    slots = slots_of(tmp_path, layout, num_engines=num_engines, tp=2)
    assert slots == [(0, 1), (2, 3)][:num_engines]
