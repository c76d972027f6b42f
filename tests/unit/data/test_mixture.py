"""Mixtures by weight: exact shares, no row twice in a batch, exact resume."""

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from megarl.config.schema import DataConfig, WeightedFile
from megarl.data.prompts import PromptDataset
from megarl.data.sampler import MixtureSampler, PromptSampler, prompt_sampler, train_files
from megarl.errors import ConfigError, DataError


def mixture(
    sizes: list[int], weights: list[float], batch_size: int, *, seed: int = 0, shuffle: bool = True
) -> MixtureSampler:
    return MixtureSampler(sizes, weights, batch_size=batch_size, seed=seed, shuffle=shuffle)


def test_shares_follow_the_weights() -> None:
    sampler = mixture([10, 10], [1, 3], 4, shuffle=False)
    # One row of the first set and three of the second in each batch of 4; rows of the second start at 10.
    assert [sampler.next_batch() for _ in range(4)] == [
        [0, 10, 11, 12],
        [1, 13, 14, 15],
        [2, 16, 17, 18],
        [3, 19, 10, 11],
    ]


def test_a_fractional_share_alternates() -> None:
    sampler = mixture([10, 10], [1, 1], 3, shuffle=False)
    # Credits after each draw: the set with the larger credit is taken, the first on a tie: 0 1 0 | 1 0 1.
    assert [sampler.next_batch() for _ in range(2)] == [[0, 1, 10], [2, 11, 12]]


weights = st.lists(st.floats(0.1, 10), min_size=1, max_size=4)


@given(weights, st.integers(1, 16), st.integers(0, 1000), st.integers(1, 12))
def test_no_batch_has_a_row_twice_and_shares_are_within_one_row_per_set(
    weights: list[float], batch_size: int, seed: int, num_batches: int
) -> None:
    size = batch_size + 3
    sampler = mixture([size] * len(weights), weights, batch_size, seed=seed)
    counts: Counter[int] = Counter()
    for _ in range(num_batches):
        batch = sampler.next_batch()
        assert len(set(batch)) == len(batch) == batch_size
        counts.update(index // size for index in batch)
    for i, weight in enumerate(weights):
        share = weight / sum(weights) * num_batches * batch_size
        assert abs(counts[i] - share) < len(weights) + 1e-6


@given(st.integers(0, 1000), st.integers(0, 30))
def test_resume_is_exact(seed: int, num_batches: int) -> None:
    sampler = mixture([7, 20], [0.3, 0.7], 5, seed=seed)
    for _ in range(num_batches):
        sampler.next_batch()
    state = json.loads(json.dumps(sampler.state_dict()))
    resumed = mixture([7, 20], [0.3, 0.7], 5, seed=seed)
    resumed.next_batch()  # what it drew before must not matter
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert [resumed.next_batch() for _ in range(20)] == [sampler.next_batch() for _ in range(20)]


def test_a_set_smaller_than_its_share_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.train\[0\]: has 3 rows, but its weight gives it up to 4 of the 4"):
        mixture([3, 100], [1, 1], 4)


def test_paths_alone_are_one_data_set() -> None:
    sampler = prompt_sampler(("a", "b"), [2, 3], batch_size=5, seed=0, shuffle=False)
    assert isinstance(sampler, PromptSampler)
    assert sampler.next_batch() == [0, 1, 2, 3, 4]
    entries = ("a", WeightedFile(path="b", weight=3.0))
    assert train_files(entries) == ("a", "b")
    sampler = prompt_sampler(entries, [6, 6], batch_size=4, seed=0, shuffle=False)
    assert sampler.next_batch() == [0, 6, 7, 8]


def test_prompts_are_counted_by_file(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    def write(name: str, questions: list[str]) -> Path:
        path = tmp_path / name
        rows = [
            {
                "prompt": [{"role": "user", "content": question}],
                "data_source": "megarl/sums",
                "reward_model": {"style": "rule", "ground_truth": "1"},
            }
            for question in questions
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    paths = [write("a.jsonl", ["1", "4444444", "2"]), write("b.jsonl", ["4444444"]), write("c.jsonl", ["1"])]
    data = PromptDataset(paths, tokenizer, DataConfig(max_prompt_tokens=12, on_long_prompt="drop"))
    assert data.num_prompts_by_file == [2, 0, 1]


def test_state_of_other_data_is_refused() -> None:
    state = mixture([7, 20], [1, 2], 5).state_dict()
    with pytest.raises(DataError, match="weight_1 was 2 and is now 3"):
        mixture([7, 20], [1, 3], 5).load_state_dict(state)
    with pytest.raises(DataError, match="size_2 was None and is now 9"):
        mixture([7, 20, 9], [1, 2, 1], 5).load_state_dict(state)
    with pytest.raises(DataError, match="dataset_size was 27 and is now None"):
        mixture([7, 20], [1, 2], 5).load_state_dict(PromptSampler(27, 5, 0).state_dict())
