"""The plan of a transfer: every needed element once, no byte more than lacks, sends spread over replicas."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.errors import WeightSyncError
from megarl.sync.plan.build import Holding, Plan, build_plan, plan_statistics
from megarl.weights.boxes import Box, Boxes, box_of, joined, num_elements, pieces, slices_of, split_rows
from megarl.weights.safetensors_map import TensorSpec
from tests.helpers.boxes import covered, received_bytes

ITEM = 4
SIZES = st.integers(1, 7)


def spec(*shape: int) -> TensorSpec:
    return TensorSpec(shape=shape, dtype=torch.float32)


def cuts(size: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    """[0, size) in consecutive ranges."""
    inner = st.lists(st.integers(1, size - 1), unique=True, max_size=3) if size > 1 else st.just([])
    return inner.map(lambda places: list(itertools.pairwise([0, *sorted(places), size])))


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    return list(itertools.product(*(draw(cuts(size)) for size in shape)))


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, TensorSpec], dict[int, Holding], dict[int, Holding], dict[int, set[int]]]:
    """Tensors of one or two axes cut in any grid, replicated; sources and receivers of any cells."""
    shapes = draw(st.lists(st.one_of(st.tuples(SIZES), st.tuples(SIZES, SIZES)), min_size=1, max_size=4))
    specs = {f"t{i}": spec(*shape) for i, shape in enumerate(shapes)}
    num_replicas, num_receivers = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    cells = defaultdict[int, dict[str, set[Box]]](lambda: defaultdict(set))
    for name, each in specs.items():
        for cell in draw(grids(each.shape)):
            for replica in range(num_replicas):
                cells[draw(st.integers(0, 3)) * num_replicas + replica][name].add(cell)
    held: dict[int, Holding] = {
        source: {name: joined(its) for name, its in by_name.items()} for source, by_name in cells.items()
    }
    needed: dict[int, Holding] = {}
    for receiver in range(num_receivers):
        names = draw(st.lists(st.sampled_from(sorted(specs)), unique=True))
        needed[receiver] = {
            name: joined(draw(st.sets(st.sampled_from(draw(grids(specs[name].shape)))))) for name in names
        }
    neighbours = {receiver: draw(st.sets(st.sampled_from(sorted(held)), max_size=2)) for receiver in needed}
    return specs, held, needed, neighbours


def coverage(plan: Plan, receiver: int, name: str, *, local: bool | None = None) -> np.ndarray:
    """How often each element of a tensor reaches a receiver."""
    count = np.zeros(plan.specs[name].shape, dtype=np.int64)
    for message in plan.of_receiver(receiver):
        for part in message.parts:
            if part.tensor == name and local in (None, message.local):
                count[slices_of(part.box)] += 1
    return count


@given(cases(), st.integers(4, 200))
def test_every_needed_element_once_and_no_byte_that_is_at_hand(
    case: tuple[Mapping[str, TensorSpec], Mapping[int, Holding], Mapping[int, Holding], Mapping[int, set[int]]],
    bucket_bytes: int,
) -> None:
    specs, held, needed, neighbours = case
    plan = build_plan(specs, held, needed, neighbours=neighbours, bucket_bytes=bucket_bytes)
    assert plan == build_plan(specs, held, needed, neighbours=neighbours, bucket_bytes=bucket_bytes)
    for receiver, holding in needed.items():
        lacks = 0
        for name, each in specs.items():
            wanted = covered(each.shape, holding.get(name, ())).astype(np.int64)
            np.testing.assert_array_equal(coverage(plan, receiver, name), wanted)
            # By brute force over elements: needed, and at none of the neighbours.
            at_hand = np.zeros(each.shape, dtype=bool)
            for source in neighbours[receiver]:
                at_hand |= covered(each.shape, held[source].get(name, ()))
            np.testing.assert_array_equal(coverage(plan, receiver, name, local=False), wanted * ~at_hand)
            lacks += int((wanted * ~at_hand).sum()) * ITEM
        assert received_bytes(plan, receiver) == lacks
    for message in plan.messages:
        assert message.local == (message.source in neighbours[message.receiver])
        for part in message.parts:
            assert any(_is_within(part.box, box) for box in held[message.source][part.tensor])


def _is_within(inner: Box, outer: Box) -> bool:
    return all(c <= a and b <= d for (a, b), (c, d) in zip(inner, outer, strict=True))


@pytest.mark.parametrize(("mib", "sizes"), [(2, [1, 1]), (64, [4] * 16), (4096, [64] * 64)])
def test_buckets_are_a_sixteenth_of_all_but_1_to_64_mib(mib: int, sizes: list[int]) -> None:
    """A tensor with rows of 64 KiB moves as a whole."""
    num_rows, width = 16 * mib, 1 << 14
    whole = {"a": (((0, num_rows), (0, width)),)}
    plan = build_plan({"a": spec(num_rows, width)}, {0: whole}, {1: whole})
    assert [message.num_bytes >> 20 for message in plan.messages] == sizes


@given(cases(), st.integers(4, 200))
def test_one_bounded_message_per_pair_and_bucket(
    case: tuple[Mapping[str, TensorSpec], Mapping[int, Holding], Mapping[int, Holding], Mapping[int, set[int]]],
    bucket_bytes: int,
) -> None:
    specs, held, needed, neighbours = case
    plan = build_plan(specs, held, needed, neighbours=neighbours, bucket_bytes=bucket_bytes)
    pairs = Counter((m.bucket, m.source, m.receiver) for m in plan.messages)
    assert set(pairs.values()) <= {1}
    assert [m.bucket for m in plan.messages] == sorted(m.bucket for m in plan.messages)
    # A row is the least that is sent at a time.
    row = max(num_elements(((0, 1), *((0, n) for n in each.shape[1:]))) for each in specs.values()) * ITEM
    for end in ("source", "receiver"):
        staged = Counter[tuple[int, int, bool]]()
        for message in plan.messages:
            staged[message.bucket, getattr(message, end), message.local] += message.num_bytes
        assert max(staged.values(), default=0) <= max(bucket_bytes, row)
    for message in plan.messages:
        offset = 0
        for part in message.parts:
            assert part.offset == offset
            offset += num_elements(part.box) * ITEM
        assert message.num_bytes == offset
    # Tensors are complete in order.
    order = list(specs)
    for receiver in needed:
        names = [order.index(part.tensor) for m in plan.of_receiver(receiver) for part in m.parts]
        by_bucket = [[order.index(p.tensor) for p in m.parts] for m in plan.of_receiver(receiver)]
        assert set(names) == {order.index(name) for name, boxes in needed[receiver].items() if boxes}
        assert all(places == sorted(places) for places in by_bucket)


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(1, 4), st.integers(1, 3), st.integers(40, 400)
)
def test_replicas_send_equal_shares_within_one_slice(
    sizes: list[int], num_replicas: int, num_receivers: int, bucket_bytes: int
) -> None:
    """Two halves of every tensor at `num_replicas` sources each."""
    specs = {f"t{i}": spec(2 * size) for i, size in enumerate(sizes)}
    halves = [{f"t{i}": (((h * size, h * size + size),),) for i, size in enumerate(sizes)} for h in range(2)]
    held = {half * num_replicas + r: halves[half] for half in range(2) for r in range(num_replicas)}
    needed = {
        receiver: {name: (((0, each.shape[0]),),) for name, each in specs.items()} for receiver in range(num_receivers)
    }
    plan = build_plan(specs, held, needed, bucket_bytes=bucket_bytes)
    for half in range(2):
        loads = [
            sum(m.num_bytes for m in plan.of_source(half * num_replicas + replica)) for replica in range(num_replicas)
        ]
        assert sum(loads) == num_receivers * sum(sizes) * ITEM
        assert max(loads) - min(loads) <= max(sizes) * ITEM


@given(cases(), st.integers(2, 5))
def test_tensors_that_are_alike_are_planned_as_each_alone(
    case: tuple[Mapping[str, TensorSpec], Mapping[int, Holding], Mapping[int, Holding], Mapping[int, set[int]]],
    num_layers: int,
) -> None:
    """Layers one after another, each tensor's in a row: the same boxes go to the same receivers as in a plan of its
    own.
    """
    specs, held, needed, neighbours = case

    def repeated(holding: Holding) -> Holding:
        return {f"{name}.{layer}": boxes for name, boxes in holding.items() for layer in range(num_layers)}

    many = {f"{name}.{layer}": each for name, each in specs.items() for layer in range(num_layers)}
    all_held, all_needed = ({i: repeated(part) for i, part in each.items()} for each in (held, needed))
    plan = build_plan(many, all_held, all_needed, neighbours=neighbours, bucket_bytes=1000)
    for name, each in many.items():
        alone = build_plan({name: each}, all_held, all_needed, neighbours=neighbours, bucket_bytes=1000)
        assert ways(plan, name) == ways(alone, name)


def ways(plan: Plan, name: str) -> set[tuple[int, bool, Box]]:
    """To whom which boxes of a tensor go, and whether locally; from whom depends on what else they send."""
    return {(m.receiver, m.local, part.box) for m in plan.messages for part in m.parts if part.tensor == name}


def test_buckets_of_processes_fill_apart() -> None:
    """Source 0 has the first two tensors and 1 the last two, a bucket each: both send at the same time."""
    specs = {f"t{i}": spec(10) for i in range(4)}
    whole = (((0, 10),),)
    held = {0: {"t0": whole, "t1": whole}, 1: {"t2": whole, "t3": whole}}
    needed = {2: {"t0": whole, "t1": whole}, 3: {"t2": whole, "t3": whole}}
    plan = build_plan(specs, held, needed, bucket_bytes=40)
    assert [(m.bucket, m.turn, m.source, m.receiver, sorted({p.tensor for p in m.parts})) for m in plan.messages] == [
        (0, 0, 0, 2, ["t0"]),
        (0, 0, 1, 3, ["t2"]),
        (1, 1, 0, 2, ["t1"]),
        (1, 1, 1, 3, ["t3"]),
    ]


def order_of(plan: Plan, receiver: int) -> list[str]:
    """Tensors as they come, where a bucket has room for one."""
    return [part.tensor.removeprefix("model.layers.") for m in plan.of_receiver(receiver) for part in m.parts]


def test_receivers_begin_at_different_stages() -> None:
    """Two stages of two layers: the second receiver gets the second stage's first, so that both stages always send."""
    specs = {f"model.layers.{layer}.{name}": spec(10) for layer in range(4) for name in "ab"}
    whole: Holding = dict.fromkeys(specs, (((0, 10),),))
    names = list(specs)
    held = {0: {name: whole[name] for name in names[:4]}, 1: {name: whole[name] for name in names[4:]}}
    plan = build_plan(specs, held, {2: whole, 3: whole}, bucket_bytes=40)
    sent = {(m.bucket, m.receiver): m.source for m in plan.messages}
    assert len(sent) == 16
    assert [sent[bucket, 2] + sent[bucket, 3] for bucket in range(8)] == [1] * 8
    assert (order_of(plan, 2)[0], order_of(plan, 3)[0]) == ("0.a", "2.a")


def test_receivers_begin_elsewhere_in_a_layer() -> None:
    """Each rank has two experts of a layer: while a receiver gets two from one rank, the other receiver gets those of
    the other.
    """
    specs = {f"model.layers.0.{expert}": spec(10) for expert in range(4)}
    whole: Holding = dict.fromkeys(specs, (((0, 10),),))
    names = list(specs)
    held = {0: {name: whole[name] for name in names[:2]}, 1: {name: whole[name] for name in names[2:]}}
    plan = build_plan(specs, held, {2: whole, 3: whole}, bucket_bytes=80)
    for bucket in (0, 1):
        for end in ("source", "receiver"):
            sizes = Counter[int]()
            for message in plan.messages:
                sizes[getattr(message, end)] += message.num_bytes * (message.bucket == bucket)
            assert set(sizes.values()) == {80}


def test_a_source_on_the_host_of_the_receiver_is_preferred() -> None:
    """Every rank has everything, two of them on each of two hosts."""
    specs = {f"model.layers.{i}.a": spec(10) for i in range(4)}
    whole: Holding = dict.fromkeys(specs, (((0, 10),),))
    hosts = {0: "x", 1: "x", 2: "y", 3: "y", 4: "x", 5: "y", 6: "z"}
    plan = build_plan(specs, dict.fromkeys(range(4), whole), dict.fromkeys((4, 5, 6), whole), hosts=hosts)
    assert {m.source for m in plan.of_receiver(4)} <= {0, 1}
    assert {m.source for m in plan.of_receiver(5)} <= {2, 3}
    assert received_bytes(plan, 6) == 4 * 10 * ITEM


@given(st.lists(st.lists(SIZES, min_size=1, max_size=4), min_size=1, max_size=5), st.integers(1, 3), st.integers(1, 4))
def test_a_layer_begins_when_the_one_two_before_is_complete(
    layers: list[list[int]], num_stages: int, num_receivers: int
) -> None:
    specs = {f"model.layers.{i}.{j}": spec(size) for i, sizes in enumerate(layers) for j, size in enumerate(sizes)}
    whole: Holding = {name: (((0, each.shape[0]),),) for name, each in specs.items()}
    held = {
        stage: {name: whole[name] for name in specs if int(name.split(".")[2]) % num_stages == stage}
        for stage in range(num_stages)
    }
    plan = build_plan(specs, held, dict.fromkeys(range(10, 10 + num_receivers), whole), bucket_bytes=1)
    for receiver in range(10, 10 + num_receivers):
        came = [int(name.split(".")[0]) for name in order_of(plan, receiver)]
        ends = {layer: i for i, layer in enumerate(came)}
        assert ends.keys() == set(range(len(layers)))
        for i in range(len(came)):
            assert len({layer for layer in came[: i + 1] if ends[layer] > i}) <= 2


def test_what_nobody_holds_is_an_error() -> None:
    held = {0: {"a": (((0, 2), (0, 3)),)}, 1: {"a": (((3, 4), (0, 3)),)}}
    with pytest.raises(WeightSyncError, match=r"no rank holds a\(\(2, 3\), \(0, 3\)\), which engine worker 5 needs"):
        build_plan({"a": spec(4, 3)}, held, {5: {"a": (((0, 4), (0, 3)),)}}, bucket_bytes=100)


def test_a_plan_by_hand() -> None:
    """Four column blocks of a [4, 8] float32 tensor to two halves; receiver 0 sits with source 0, receiver 1 with
    source 3.
    """
    held = {rank: {"a": (((0, 4), (2 * rank, 2 * rank + 2)),)} for rank in range(4)}
    needed = {0: {"a": (((0, 4), (0, 4)),)}, 1: {"a": (((0, 4), (4, 8)),)}}
    plan = build_plan({"a": spec(4, 8)}, held, needed, neighbours={0: [0], 1: [3]}, bucket_bytes=1000)
    ways = {(m.source, m.receiver, m.local, m.num_bytes) for m in plan.messages}
    assert ways == {(0, 0, True, 32), (1, 0, False, 32), (2, 1, False, 32), (3, 1, True, 32)}
    assert (received_bytes(plan, 0), received_bytes(plan, 1, local=True)) == (32, 32)
    numbers = plan_statistics(plan)
    assert (numbers.wire_bytes, numbers.local_bytes, numbers.num_messages, numbers.num_buckets) == (64, 64, 2, 1)
    assert (numbers.max_received_bytes, numbers.max_sent_bytes) == (32, 32)


def test_two_sections_of_a_tensor_by_hand() -> None:
    """Gate and up in 4 rows each of a [8, 3] tensor: each rank holds half of both, and worker 2 needs one."""
    halves = ((((0, 2), (0, 3)), ((4, 6), (0, 3))), (((2, 4), (0, 3)), ((6, 8), (0, 3))))
    held = {rank: {"a": halves[rank]} for rank in (0, 1)}
    plan = build_plan(
        {"a": spec(8, 3)}, held, {2: {"a": halves[1]}, 3: {"a": (((0, 8), (0, 3)),)}}, neighbours={3: [1]}
    )
    assert {(m.source, m.receiver, m.local, m.num_bytes) for m in plan.messages} == {
        (1, 2, False, 48),
        (0, 3, False, 48),
        (1, 3, True, 48),
    }
    assert {part.box for m in plan.of_receiver(2) for part in m.parts} == set(halves[1])


@pytest.mark.parametrize(
    ("boxes", "expected"),
    [
        ([((4, 6), (0, 3)), ((0, 2), (0, 3))], (((0, 2), (0, 3)), ((4, 6), (0, 3)))),
        ([((2, 4), (0, 3)), ((0, 2), (0, 3))], (((0, 4), (0, 3)),)),
        # Side by side, but rows of the first come between those of the second.
        ([((0, 2), (0, 1)), ((0, 2), (1, 3))], (((0, 2), (0, 1)), ((0, 2), (1, 3)))),
        # One row: its elements do follow each other. Then the next row.
        ([((0, 1), (0, 1)), ((0, 1), (1, 3)), ((1, 2), (0, 3))], (((0, 2), (0, 3)),)),
        ([((0, 0), (0, 3)), ((2, 3), (1, 1))], ()),
    ],
)
def test_boxes_join_where_their_elements_follow(boxes: list[Box], expected: Boxes) -> None:
    assert joined(boxes) == expected


def test_boxes() -> None:
    assert box_of((slice(2, 4),), (5, 3)) == ((2, 4), (0, 3))
    assert slices_of(((2, 4), (1, 3)), ((1, 5), (0, 3))) == (slice(1, 3), slice(1, 3))
    assert split_rows(((1, 6), (0, 3)), 7) == [((1, 3), (0, 3)), ((3, 5), (0, 3)), ((5, 6), (0, 3))]
    assert split_rows(((0, 2), (0, 9)), 4) == [((0, 1), (0, 9)), ((1, 2), (0, 9))]
    cut = pieces(((0, 4),), (((0, 3),), ((2, 9),)))
    assert [(piece.box, piece.holders) for piece in cut] == [(((0, 2),), (0,)), (((2, 3),), (0, 1)), (((3, 4),), (1,))]
