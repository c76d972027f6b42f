"""What batches of rows answer, and how sums become a loss and metrics."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from megarl.types import (
    FinishReason,
    LossSums,
    Reward,
    Row,
    Sample,
    Segment,
    SegmentSource,
    VersionSpan,
    batches,
    prompt_segment,
    row_batch,
    row_from_sample,
    scored_batch,
    version_spans,
)

CPU = torch.device("cpu")


def make_row(**quantities: list[float]) -> Row:
    return Row(
        uid="a",
        sample_index=3,
        token_ids=np.arange(3),
        num_prompt_tokens=1,
        loss_mask=np.array([True, False]),
        quantities={name: np.array(values, np.float32) for name, values in quantities.items()},
    )


def test_a_quantity_that_was_not_computed_is_named() -> None:
    batch = row_batch([make_row(advantages=[1.0, 2.0])], device=CPU)
    assert batch.quantity("advantages").tolist() == [[1.0, 2.0]]
    with pytest.raises(KeyError, match=r"values was not computed for this batch \(there are: \['advantages'\]\)"):
        batch.quantity("values")


def test_quantities_are_padded_when_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few algorithms read all of them, and each would take 4 bytes a token, padding included."""
    padded = []
    pad_rows = batches.pad_rows

    def recording(arrays: list[np.ndarray], *, dtype: torch.dtype) -> torch.Tensor:
        padded.append(dtype)
        return pad_rows(arrays, dtype=dtype)

    monkeypatch.setattr(batches, "pad_rows", recording)
    rows = [make_row(old_logprobs=[-1.0, -2.0], old_entropy=[0.5, 0.25])]
    batch = scored_batch(rows, [Reward(score=1.0, correct=True)])
    assert padded == [torch.bool]
    assert set(batch.quantities) == {"old_logprobs", "old_entropy"}
    assert "ref_logprobs" not in batch.quantities
    for _ in range(2):
        assert batch.quantity("old_logprobs").tolist() == [[-1.0, -2.0]]
    assert padded == [torch.bool, torch.float32]
    other = make_row(old_logprobs=[-1.0, -2.0])
    with pytest.raises(ValueError, match=r"row a/3: \['old_entropy'\] are quantities of some rows only"):
        scored_batch([*rows, other], [Reward(score=1.0, correct=True)] * 2)


def test_a_batch_without_rows_lacks_nothing() -> None:
    """Ranks that have no rows compute the same sums as the others, of nothing."""
    batch = row_batch([], device=CPU)
    assert batch.loss_mask.shape == batch.quantity("advantages").shape == (0, 0)
    assert batch.quantity("advantages").is_floating_point()


def test_a_row_with_only_some_quantities() -> None:
    row = make_row(advantages=[1.0, 0.0], values=[2.0, 0.0])
    assert set(row.only({"values", "returns"}).quantities) == {"values"}
    assert row.only(()).quantities == {}
    assert set(row.quantities) == {"advantages", "values"}


def test_nuclei_of_a_sample_cover_its_response() -> None:
    """Segments of different widths, and one that no engine sampled."""

    def segment(source: SegmentSource, tokens: list[int], nucleus: list[list[int]] | None = None) -> Segment:
        return Segment(
            source=source,
            token_ids=np.array(tokens),
            loss_mask=np.ones(len(tokens), np.bool_),
            versions=version_spans(np.zeros(len(tokens), np.int64)),
            nucleus=None if nucleus is None else np.array(nucleus, np.int32),
        )

    given, own = segment(SegmentSource.DEMONSTRATION, [4]), segment(SegmentSource.POLICY, [6, 7], [[6, 8], [7, -1]])
    sample = Sample(
        uid="a",
        sample_index=0,
        seed=0,
        segments=(prompt_segment([1]), given, own, segment(SegmentSource.POLICY, [9], [[9]])),
        finish_reason=FinishReason.STOP,
    )
    row = row_from_sample(sample)
    assert row.nucleus is not None
    assert row.nucleus.tolist() == [[-1, -1], [6, 8], [7, -1], [9, -1]]
    assert row.only(()).nucleus is None
    assert row.only((), nucleus=True).nucleus is row.nucleus
    assert replace(sample, segments=(prompt_segment([1]), given)).nucleus is None
    with pytest.raises(ValueError, match=r"row a/0: nucleus \[7\] of response token 2 lacks the token itself, 5$"):
        replace(row, token_ids=np.array([1, 4, 6, 5, 9]))


def test_every_sum_has_its_denominator() -> None:
    one = torch.tensor(1.0)
    sums = LossSums(
        objective={"loss": torch.tensor(6.0), "imitated": torch.tensor(10.0)},
        metrics={"loss": {"a": one}, "tokens": {"b": one, "c": one}, "imitated": {"d": one}},
    )
    counts = {"loss": 2.0, "tokens": 4.0, "imitated": 32.0}
    assert sums.total(counts).item() == 6 / 2 + 10 / 32
    assert sums.shares(counts) == {"a": 1 / 2, "b": 1 / 4, "c": 1 / 4, "d": 1 / 32}
    assert LossSums(objective={"loss": torch.tensor(6.0)}).total(counts).item() == 3.0


def test_token_ids_take_four_bytes() -> None:
    """They cross from engine to driver to rank, and no vocabulary needs more."""
    prompt = prompt_segment([5, 6])
    answer = replace(prompt_segment([7]), source=SegmentSource.POLICY, loss_mask=np.ones(1, np.bool_))
    sample = Sample(uid="a", sample_index=0, seed=0, segments=(prompt, answer), finish_reason=FinishReason.STOP)
    row = row_from_sample(sample)
    assert row.token_ids.tolist() == [5, 6, 7]
    assert row.token_ids.dtype == sample.response_token_ids.dtype == np.int32
    assert sample.num_response_tokens == 1
    # A single segment is not copied.
    assert row.loss_mask is answer.loss_mask


def test_a_sampled_token_takes_nine_bytes_on_its_way() -> None:
    """Its id, its log-prob and whether it trains; versions are spans, however many tokens one sampled."""
    n = 10_000
    segment = Segment(
        source=SegmentSource.POLICY,
        token_ids=np.arange(n, dtype=np.int32),
        loss_mask=np.ones(n, np.bool_),
        versions=(VersionSpan(3, n - 1), VersionSpan(4, 1)),
        rollout_logprobs=np.zeros(n, np.float32),
    )
    assert 9 * n < len(pickle.dumps(segment)) < 9 * n + 1000
    assert segment.weight_versions.tolist() == [3] * (n - 1) + [4]
    with pytest.raises(ValueError, match="segment versions: got 2 tokens in spans, expected 10000 like token_ids"):
        replace(segment, versions=(VersionSpan(3, 2),))
