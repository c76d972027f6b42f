"""Trees of tokens: paths, the longest known one, and the rows that the trainer makes of them."""

import numpy as np
import pytest

from megarl.types import Row
from megarl.types.forks import Fork, branches, longest_known, path_before, path_to, require_forks
from megarl.types.rows import paths_of

# 0 1 2 3, after 1: 4 5 6, after 5: 7 8, a root: 9 10, after 10: nothing more.
FORKS = (Fork(4, 1), Fork(7, 5), Fork(9, -1))
IDS = np.array([10, 11, 12, 13, 22, 23, 24, 33, 34, 40, 41], dtype=np.int32)


def test_paths_go_from_the_root_to_a_token() -> None:
    assert branches(11, FORKS) == [(0, 4), (4, 7), (7, 9), (9, 11)]
    paths = [path_to(end, FORKS).tolist() for end in (4, 7, 9, 11, 8, 1)]
    assert paths == [[0, 1, 2, 3], [0, 1, 4, 5, 6], [0, 1, 4, 5, 7, 8], [9, 10], [0, 1, 4, 5, 7], [0]]
    assert path_to(3, ()).tolist() == [0, 1, 2]
    # Of tokens that are there, and of one that would come next.
    assert [path_before(index, FORKS).tolist() for index in (0, 3, 7, 9)] == [[], [0, 1, 2], [0, 1, 4, 5], []]
    assert path_before(11, FORKS).tolist() == [9, 10]
    assert path_before(11, (*FORKS, Fork(11, 4))).tolist() == [0, 1, 4]


@pytest.mark.parametrize(
    ("wanted", "count", "after"),
    [
        ([10, 11, 22, 23, 33, 50], 5, 7),
        ([10, 11, 12], 3, 2),
        ([10, 11, 22, 23, 24, 1], 5, 6),
        ([40, 1], 1, 9),
        ([41], 0, -1),
        ([10, 11, 22, 23, 33, 34], 6, 8),
        ([], 0, -1),
    ],
)
def test_the_longest_known_path_is_found(wanted: list[int], count: int, after: int) -> None:
    assert longest_known(IDS, FORKS, np.array(wanted, dtype=np.int32)) == (count, after)


@pytest.mark.parametrize("forks", [[(1, 0)], [(4, 4)], [(4, -2)], [(4, 1), (4, 1)], [(5, 1), (4, 1)], [(11, 2)]])
def test_wrong_forks_are_refused(forks: list[tuple[int, int]]) -> None:
    with pytest.raises(
        ValueError, match=r"row a: got the fork \(\d+, -?\d+\), expected starts that ascend from 2 to 10"
    ):
        require_forks([Fork(*fork) for fork in forks], num_given=2, num_tokens=11, whose="row a")


def row_of(mask: list[int], **rest: object) -> Row:
    return Row(
        uid="a",
        sample_index=0,
        token_ids=IDS,
        num_prompt_tokens=2,
        loss_mask=np.array(mask, dtype=np.bool_),
        forks=FORKS,
        **rest,  # type: ignore[arg-type]
    )


def test_each_label_is_in_one_path_of_its_row() -> None:
    experts = np.arange(11, dtype=np.int16).reshape(11, 1, 1)
    # Of the tokens 2 to 10, these train: 2, 3, 6, 7, 8 and 10; 4 and 5 are given.
    paths = paths_of([row_of([1, 1, 0, 0, 1, 1, 1, 0, 1], routed_experts=experts)])
    assert [path.row.token_ids.tolist() for path in paths] == [
        [10, 11, 12, 13],
        [10, 11, 22, 23, 24],
        [10, 11, 22, 23, 33, 34],
        [40, 41],
    ]
    assert [path.row.num_prompt_tokens for path in paths] == [2, 2, 2, 1]
    labels = [path.columns[path.row.loss_mask].tolist() for path in paths]
    assert labels == [[0, 1], [4], [5, 6], [8]]
    assert [path.row.routed_experts.ravel().tolist() for path in paths if path.row.routed_experts is not None] == [
        [0, 1, 2, 3],
        [0, 1, 4, 5, 6],
        [0, 1, 4, 5, 7, 8],
        [9, 10],
    ]


def test_branches_without_labels_are_not_computed_by_themselves() -> None:
    paths = paths_of([row_of([0, 0, 0, 0, 0, 1, 1, 0, 0])])
    assert [path.row.token_ids.tolist() for path in paths] == [[10, 11, 22, 23, 33, 34]]
    # A row without labels is computed as today.
    paths = paths_of([row_of([0] * 9)])
    assert [path.row.token_ids.tolist() for path in paths] == [[10, 11, 12, 13]]


def test_a_fork_within_the_prompt_has_a_shorter_prompt() -> None:
    row = Row(
        uid="a",
        sample_index=0,
        token_ids=np.array([1, 2, 3, 4, 5], dtype=np.int32),
        num_prompt_tokens=3,
        loss_mask=np.array([1, 1], dtype=np.bool_),
        forks=(Fork(4, 0),),
    )
    paths = paths_of([row])
    assert [path.row.token_ids.tolist() for path in paths] == [[1, 2, 3, 4], [1, 5]]
    assert [path.row.num_prompt_tokens for path in paths] == [3, 1]
    assert [path.columns.tolist() for path in paths] == [[0], [1]]


def test_nothing_predicts_the_first_token_of_a_path() -> None:
    with pytest.raises(ValueError, match="first token of a path, which nothing predicts"):
        row_of([0, 0, 0, 0, 0, 0, 0, 1, 0])
