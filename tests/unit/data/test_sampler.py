"""The order of rows: complete epochs, no row twice in a batch, exact resume."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.data.sampler import PromptSampler
from megarl.errors import ConfigError, DataError


def test_without_shuffle_batches_run_across_epochs() -> None:
    sampler = PromptSampler(5, 3, seed=0, shuffle=False)
    assert [sampler.next_batch() for _ in range(2)] == [[0, 1, 2], [3, 4, 0]]
    assert sampler.epoch == 1
    assert [sampler.next_batch() for _ in range(3)] == [[1, 2, 3], [4, 0, 1], [2, 3, 4]]


def test_rows_of_an_unfinished_batch_come_later_in_the_next_epoch() -> None:
    sampler = PromptSampler(3, 2, seed=0, shuffle=False)
    # Epoch 1 would start with 0, 1, 2 after the held row 2: [2, 0], then [1, 2].
    assert [sampler.next_batch() for _ in range(3)] == [[0, 1], [2, 0], [1, 2]]
    sampler = PromptSampler(4, 3, seed=0, shuffle=False)
    # 3 is held, so 0 and 1 complete the batch and 2, 3 are left; they are held, so epoch 2 starts with 0.
    assert [sampler.next_batch() for _ in range(4)] == [[0, 1, 2], [3, 0, 1], [2, 3, 0], [1, 2, 3]]


sizes = st.integers(1, 30).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))


@given(sizes, st.integers(0, 1000), st.integers(1, 6), st.booleans())
def test_every_epoch_has_every_row_and_no_batch_has_one_twice(
    size: tuple[int, int], seed: int, num_epochs: int, shuffle: bool
) -> None:
    dataset_size, batch_size = size
    sampler = PromptSampler(dataset_size, batch_size, seed, shuffle)
    batches = [sampler.next_batch() for _ in range(num_epochs * dataset_size)]
    assert all(len(set(batch)) == batch_size for batch in batches)
    rows = [index for batch in batches for index in batch]
    for start in range(0, len(rows), dataset_size):
        assert sorted(rows[start : start + dataset_size]) == list(range(dataset_size))


@given(sizes, st.integers(0, 1000), st.integers(0, 40))
def test_resume_is_exact(size: tuple[int, int], seed: int, num_batches: int) -> None:
    sampler = PromptSampler(*size, seed)
    for _ in range(num_batches):
        sampler.next_batch()
    state = sampler.state_dict()
    assert all(type(value) is int for value in state.values())
    resumed = PromptSampler(*size, seed)
    resumed.next_batch()  # what it drew before must not matter
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert [resumed.next_batch() for _ in range(20)] == [sampler.next_batch() for _ in range(20)]


def test_epochs_and_seeds_differ() -> None:
    first = PromptSampler(100, 100, seed=0)
    epochs = [tuple(first.next_batch()) for _ in range(5)]
    other = tuple(PromptSampler(100, 100, seed=1).next_batch())
    assert len({*epochs, other, tuple(range(100))}) == 7


def test_the_first_row_is_uniform() -> None:
    counts = Counter(PromptSampler(4, 1, seed=seed).next_batch()[0] for seed in range(400))
    # Binomial(400, 1/4) has mean 100 and standard deviation 8.7; five of them.
    assert all(56 < counts[index] < 144 for index in range(4))


@pytest.mark.parametrize("batch_size", [0, 4])
def test_batch_size_out_of_range(batch_size: int) -> None:
    with pytest.raises(
        ConfigError, match=f"^trainer.prompts_per_step: got {batch_size}, expected 1 to 3, .*; lower it"
    ):
        PromptSampler(3, batch_size, seed=0)


def test_state_of_other_data_is_refused() -> None:
    state = PromptSampler(10, 2, seed=0).state_dict()
    with pytest.raises(DataError, match="dataset_size was 10 and is now 9"):
        PromptSampler(9, 2, seed=0).load_state_dict(state)
    with pytest.raises(DataError, match="shuffle was 1 and is now 0"):
        PromptSampler(10, 2, seed=0, shuffle=False).load_state_dict(state)
