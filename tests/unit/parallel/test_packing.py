"""Rows end to end, labels shifted by one, and results back in their places."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from megarl.parallel.packing import PackAlignment, pack_rows
from megarl.types import Row
from megarl.types.forks import Fork
from tests.helpers import rank_parts
from tests.helpers.rank_pool import RankPool
from tests.helpers.rows import random_rows

GetPool = Callable[[int], RankPool]


def make_row(tokens: list[int], loss_mask: list[bool]) -> Row:
    return Row(
        uid="q",
        sample_index=0,
        token_ids=np.array(tokens),
        num_prompt_tokens=len(tokens) - len(loss_mask),
        loss_mask=np.array(loss_mask),
    )


def test_two_rows_by_hand(rank_pool: GetPool) -> None:
    rows = [make_row([10, 11, 12, 13], [True, True]), make_row([20, 21, 22], [False, True])]
    pack = rank_pool(1).run(rank_parts.pack_fields, rows, 4)[0]
    # The shorter row comes first; one token fills up to a multiple of 4.
    assert pack.input_ids.tolist() == [[20, 21, 22, 10, 11, 12, 13, 0]]
    assert pack.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3, 0]]
    assert (pack.cu_seqlens.tolist(), pack.cu_seqlens.dtype) == ([0, 3, 7, 8], torch.int32)
    assert pack.max_length == 4
    # 22 is predicted at token 21; 12 and 13 at 11 and 12. Token 21 is outside the mask.
    assert pack.labels.tolist() == [22, 12, 13]
    assert pack.positions.tolist() == [1, 4, 5]
    assert pack.scattered.tolist() == [[2.0, 3.0], [0.0, 1.0]]
    assert pack.scatter_grad.tolist() == [2.0, 4.0, 6.0]


def test_what_environments_said_is_predicted_on_its_own_branch(rank_pool: GetPool) -> None:
    """A row that forks after 11: both branches have a reply, of which a token or two are to be predicted."""
    row = replace(make_row([10, 11, 12, 13, 20, 21], [True, False, False, True, False]), forks=(Fork(4, 1),))
    row = replace(row, nucleus=np.array([[11], [-1], [-1], [20], [-1]]))
    row = row.with_quantities(observed=np.array([0, 1, 1, 0, 1], np.float32))
    pack = rank_pool(1).run(rank_parts.pack_fields, [row], 1, True)[0]
    assert pack.input_ids.tolist() == [[10, 11, 12, 13, 20, 21]]
    assert pack.labels.tolist() == [11, 12, 20, 13, 21]
    assert pack.positions.tolist() == [0, 1, 1, 2, 4]
    one = pack_rows([row], alignment=PackAlignment(), device=torch.device("cpu"), shares_prefixes=True)
    assert one.nucleus is not None
    assert one.nucleus[:, 0].tolist() == [11, -1, 20, -1, -1]
    plain = rank_pool(1).run(rank_parts.pack_fields, [row.only(())], 1, True)[0]
    assert plain.labels.tolist() == [11, 20]


def test_rows_share_their_prefixes(rank_pool: GetPool) -> None:
    """The shortest row of the prompt 1 2 3 holds it, and predicts from its last token a label of another row too."""
    rows = [
        make_row([1, 2, 3, 10, 11, 12], [True, True, True]),
        make_row([7, 30], [True]),
        make_row([1, 2, 3, 20, 21], [True, True]),
        make_row([7, 31, 32], [False, True]),
        make_row([1, 2, 4, 40, 41, 42, 43], [True, False, True, True]),
    ]
    pack = rank_pool(1).run(rank_parts.pack_fields, rows, 5, True)[0]
    assert pack.input_ids.tolist() == [[7, 30, 31, 32, 1, 2, 3, 20, 21, 10, 11, 12, 4, 40, 41, 42, 43, 0, 0, 0]]
    assert pack.position_ids.tolist() == [[0, 1, 1, 2, 0, 1, 2, 3, 4, 3, 4, 5, 2, 3, 4, 5, 6, 0, 1, 2]]
    assert pack.cu_seqlens.tolist() == [0, 2, 4, 9, 12, 17, 20]
    assert pack.max_length == 7
    assert pack.labels.tolist() == [30, 32, 20, 10, 21, 11, 12, 40, 42, 43]
    assert pack.positions.tolist() == [0, 2, 6, 6, 7, 9, 10, 12, 14, 15]
    assert pack.scattered.tolist() == [[4, 6, 7, 0], [1, 0, 0, 0], [3, 5, 0, 0], [0, 2, 0, 0], [8, 0, 9, 10]]


def test_a_row_inside_another_has_no_part_of_its_own(rank_pool: GetPool) -> None:
    """Of three equal beginnings, the shortest is held first; each label is predicted where its token's parent is."""
    rows = [
        make_row([1, 2, 3, 4, 5], [False, False, True]),
        make_row([1, 2, 3], [True]),
        make_row([1, 2, 3, 4], [False, True]),
        make_row([1, 2, 3, 4], [False, True]),
    ]
    pack = rank_pool(1).run(rank_parts.pack_fields, rows, 1, True)[0]
    assert pack.input_ids.tolist() == [[1, 2, 3, 4, 5]]
    assert pack.cu_seqlens.tolist() == [0, 3, 4, 4, 5]
    assert (pack.labels.tolist(), pack.positions.tolist()) == ([3, 4, 4, 5], [1, 2, 2, 3])
    assert pack.scattered.tolist() == [[0, 0, 4], [1, 0, 0], [0, 2, 0], [0, 3, 0]]


def test_nuclei_follow_their_labels(rank_pool: GetPool) -> None:
    """Rows with nuclei of different widths, and one without; token 21 is outside the mask."""
    rows = [
        replace(make_row([10, 11, 12, 13], [True, True]), nucleus=np.array([[12, 7, 9], [5, 13, -1]], np.int32)),
        replace(make_row([20, 21, 22], [False, True]), nucleus=np.array([[-1], [22]], np.int32)),
        make_row([30, 31, 32, 33, 34], [True]),
    ]
    pack = rank_pool(1).run(rank_parts.pack_fields, rows, 1)[0]
    assert pack.labels.tolist() == [22, 12, 13, 34]
    assert pack.nucleus.tolist() == [[22, -1, -1], [12, 7, 9], [5, 13, -1], [-1, -1, -1]]
    assert rank_pool(1).run(rank_parts.pack_fields, rows[2:], 1)[0].nucleus is None


@pytest.mark.parametrize(("multiple", "num_sequences"), [(1, 2), (7, 2), (2, 3), (16, 3)])
def test_filler_is_a_sequence_of_its_own(rank_pool: GetPool, multiple: int, num_sequences: int) -> None:
    rows = [make_row([1, 2, 3], [True]), make_row([4, 5, 6, 7], [True])]
    pack = rank_pool(1).run(rank_parts.pack_fields, rows, multiple)[0]
    assert len(pack.cu_seqlens) - 1 == num_sequences
    assert pack.input_ids.shape == pack.position_ids.shape == (1, pack.cu_seqlens[-1])
    assert pack.input_ids.shape[1] == -(-7 // multiple) * multiple
    assert pack.max_length == pack.cu_seqlens.diff().max()
    assert pack.labels.tolist() == [3, 7]


def test_every_kept_label_is_the_next_token_of_its_row(rank_pool: GetPool) -> None:
    lengths = [(3, 5), (1, 1), (4, 4), (1, 9), (2, 6)]
    rows = [*random_rows(lengths, seed=3), make_row([1, 2], [False])]
    pack = rank_pool(1).run(rank_parts.pack_fields, rows, 2)[0]
    assert len(pack.labels) == sum(row.num_loss_tokens for row in rows)
    assert torch.equal(pack.input_ids[0, pack.positions + 1], pack.labels)
    # The scattered k-th value stands where row and column name the k-th label.
    assert pack.scattered.shape == (len(rows), 9)
    for row, values in zip(rows, pack.scattered, strict=True):
        kept = np.flatnonzero(row.loss_mask)
        assert np.flatnonzero(values).tolist() == kept.tolist()
        numbers = values[kept].long() - 1
        response = row.token_ids[row.num_prompt_tokens :]
        assert pack.labels[numbers].tolist() == response[kept].tolist()
        # Same sequence, and as far into it as the token before the label is into the row.
        in_row = pack.position_ids[0, pack.positions[numbers]]
        assert in_row.tolist() == (row.num_prompt_tokens + kept - 1).tolist()


def test_rows_without_labels(rank_pool: GetPool) -> None:
    pack = rank_pool(1).run(rank_parts.pack_fields, [make_row([1, 2, 3], [False, False])], 1)[0]
    assert (len(pack.labels), len(pack.positions)) == (0, 0)
    assert pack.scattered.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize(("multiple", "num_tokens"), [(1, 1), (4, 4)])
def test_no_rows_are_a_filler_alone(rank_pool: GetPool, multiple: int, num_tokens: int) -> None:
    """A rank without rows passes a sequence through the model, of which nothing is kept."""
    pack = rank_pool(1).run(rank_parts.pack_fields, [], multiple)[0]
    assert pack.input_ids.tolist() == [[0] * num_tokens]
    assert pack.position_ids.tolist() == [list(range(num_tokens))]
    assert (pack.cu_seqlens.tolist(), pack.max_length) == ([0, num_tokens], num_tokens)
    assert (len(pack.labels), len(pack.positions)) == (0, 0)
    assert pack.scattered.shape == (0, 0)
    assert pack.scatter_grad.tolist() == []


def test_no_rows_under_context_parallelism(rank_pool: GetPool) -> None:
    """Two ranks take an early and a late one of four chunks, each as long as tensor parallelism asks."""
    packs = rank_pool(1).run(rank_parts.context_parallel_packs, [], 2, 3)[0]
    assert [ids.shape for ids, _ in packs] == [(1, 6), (1, 6)]
    assert [positions.tolist() for _, positions in packs] == [[[0, 1, 2, 9, 10, 11]], [[3, 4, 5, 6, 7, 8]]]


def test_experts_of_tokens_by_hand(rank_pool: GetPool) -> None:
    """One layer, one expert per token. The shorter row comes first; one of three rows recorded nothing."""
    long, short, silent = make_row([1, 2, 3, 4], [True]), make_row([5, 6, 7], [True]), make_row([8, 9], [True])
    recorded = [
        replace(long, routed_experts=np.array([3, 1, 2, -1], dtype=np.int16)[:, None, None]),
        replace(short, routed_experts=np.array([0, 5, 4], dtype=np.int16)[:, None, None]),
        silent,
    ]

    def packed(rows: list[Row], *, tp: int = 1, cp: int = 1, replay: bool = True) -> list[tuple[object, object]]:
        found = rank_pool(1).run(rank_parts.pack_experts, rows, tp=tp, cp=cp, replay_routing=replay)[0]
        return [
            (rows_of.tolist(), None if experts is None else experts[:, 0, 0].tolist()) for rows_of, experts in found
        ]

    token_rows = [2, 2, 1, 1, 1, 0, 0, 0, 0]
    assert packed(recorded) == [(token_rows, [-1, -1, 0, 5, 4, 3, 1, 2, -1])]
    # A filler belongs to no row and chooses freely.
    assert packed(recorded, tp=5) == [([*token_rows, -1], [-1, -1, 0, 5, 4, 3, 1, 2, -1, -1])]
    assert packed(recorded, replay=False) == [(token_rows, None)]
    assert packed([long, short, silent]) == [(token_rows, None)]
    # Rows of 2, 3 and 4 tokens are padded to 4 each; a rank has the first and the last, or the others.
    first = ([2, -1, 1, -1, 0, 0], [-1, -1, 0, -1, 3, -1])
    second = ([2, -1, 1, 1, 0, 0], [-1, -1, 5, 4, 1, 2])
    assert packed(recorded, cp=2) == [first, second]


def test_experts_are_those_of_every_token() -> None:
    with pytest.raises(ValueError, match=r"row q/0: routed_experts has shape \(3, 1, 2\), expected \(4, layers"):
        replace(make_row([1, 2, 3, 4], [True]), routed_experts=np.zeros((3, 1, 2), dtype=np.int16))


@pytest.mark.parametrize("cp", [1, 2])
def test_float8_scales_whole_blocks_of_tokens_on_every_rank(rank_pool: Callable[[int], RankPool], cp: int) -> None:
    """Under sequence parallelism each of two ranks has a half of its tokens."""
    rows = random_rows([(5, 12), (3, 20)])
    for own, total in rank_pool(1).run(rank_parts.pack_lengths, rows, 2, cp, 32)[0]:
        assert own % (2 * 32) == 0
        assert total == own * cp
