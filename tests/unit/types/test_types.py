"""What batches of rows answer, and how sums become a loss and metrics."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megarl.types import (
    FinishReason,
    LossSums,
    Row,
    Sample,
    Segment,
    SegmentSource,
    prompt_segment,
    row_batch,
    row_from_sample,
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
            weight_versions=np.zeros(len(tokens), np.int64),
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
