"""docs/algorithms.md against the code it describes."""

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from megarl.algos.advantages import ADVANTAGE_ESTIMATORS
from megarl.algos.aggregation import AGGREGATIONS
from megarl.algos.kl import KL_CONTROLLERS, KL_ESTIMATORS
from megarl.algos.policy_losses import POLICY_LOSSES

PAGE = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("registry", [ADVANTAGE_ESTIMATORS, POLICY_LOSSES, KL_ESTIMATORS, KL_CONTROLLERS, AGGREGATIONS])
def test_every_registered_name_is_in_a_table(registry: Iterable[str]) -> None:
    first_cells = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("|")]
    documented = {name for cell in first_cells for name in re.findall(r"`([^`]+)`", cell)}
    assert set(registry) <= documented


def test_every_test_file_named_exists() -> None:
    named = set(re.findall(r"`(?:tests/unit/algos/)?(test_\w+\.py)`", PAGE))
    assert len(named) > 5
    assert [name for name in sorted(named) if not (Path(__file__).parent / name).is_file()] == []
