"""What batches of rows answer, and how sums become a loss and metrics."""

import numpy as np
import pytest
import torch

from megarl.types import LossSums, Row, row_batch

CPU = torch.device("cpu")


def make_row(**scores: list[float]) -> Row:
    return Row(
        uid="a",
        sample_index=3,
        token_ids=np.arange(3),
        num_prompt_tokens=1,
        loss_mask=np.array([True, False]),
        scores={name: np.array(values, np.float32) for name, values in scores.items()},
    )


def test_a_score_that_was_not_computed_is_named() -> None:
    batch = row_batch([make_row(advantages=[1.0, 2.0])], device=CPU)
    assert batch.score("advantages").tolist() == [[1.0, 2.0]]
    with pytest.raises(KeyError, match=r"values was not computed for this batch \(there are: \['advantages'\]\)"):
        batch.score("values")


def test_a_batch_without_rows_lacks_nothing() -> None:
    """Ranks that have no rows compute the same sums as the others, of nothing."""
    batch = row_batch([], device=CPU)
    assert batch.loss_mask.shape == batch.score("advantages").shape == (0, 0)
    assert batch.score("advantages").is_floating_point()


def test_a_row_with_only_some_scores() -> None:
    row = make_row(advantages=[1.0, 0.0], values=[2.0, 0.0])
    assert set(row.only({"values", "returns"}).scores) == {"values"}
    assert row.only(()).scores == {}
    assert set(row.scores) == {"advantages", "values"}


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
