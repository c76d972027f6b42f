"""Actor, reference and critic in processes and layouts of their own say and learn what they do in shared ones."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from megarl.types import FloatArray
from tests.e2e import layouts_run
from tests.e2e.layouts_run import Report, Seen
from tests.helpers.checkpoints import add_value_head, make_checkpoint
from tests.helpers.rank_pool import RankPool

# Minutes beside what the default set has of it.
pytestmark = pytest.mark.long

# float32 rounding; an optimizer step moves log-probs and values by 1e-2 and more.
SCORE = 1e-5
MOVED = 1e-3


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def report(directory: Path) -> Report:
    model = make_checkpoint(directory / "model", tied=True)
    critic = add_value_head(model, directory / "critic")
    with RankPool(1, timeout_s=240.0) as pool:
        return pool.run(layouts_run.run, str(model), str(critic), str(directory))[0]


def difference(got: Sequence[FloatArray], expected: Sequence[FloatArray]) -> float:
    return float(np.abs(np.concatenate(list(got)) - np.concatenate(list(expected))).max())


def assert_same(got: Seen, expected: Seen) -> None:
    assert difference(got.logprobs, expected.logprobs) <= SCORE
    assert difference(got.ref_logprobs, expected.ref_logprobs) <= SCORE
    assert difference(got.values, expected.values) <= SCORE
    for ours, theirs in zip(got.metrics, expected.metrics, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)


def test_each_layout_has_ranks_of_its_own(report: Report) -> None:
    assert report.names == [
        "trainer rank 0",
        "trainer rank 1",
        "reference rank 0",
        "reference rank 1",
        "critic rank 0",
        "critic rank 1",
    ]


def test_forward_passes_and_updates_are_those_of_a_shared_layout(report: Report) -> None:
    for apart, together in zip(report.apart, report.together, strict=True):
        assert_same(apart, together)
    first, second = report.apart
    # The reference starts as the actor, which then moves away from it.
    assert difference(first.ref_logprobs, first.logprobs) <= SCORE
    assert difference(second.ref_logprobs, first.ref_logprobs) == 0
    assert difference(second.logprobs, first.logprobs) > MOVED
    assert difference(second.values, first.values) > MOVED
    assert [{name for name in metrics if name.endswith("/loss")} for metrics in first.metrics] == [
        {"actor/loss"},
        {"critic/loss"},
    ]


def test_a_checkpoint_of_several_layouts_continues_in_one(report: Report) -> None:
    assert_same(report.resumed, report.apart[1])


def test_an_exported_critic_is_loaded_again_and_by_transformers(report: Report, directory: Path) -> None:
    assert difference(report.exported, report.values_before_export) <= SCORE
    critic = AutoModelForSequenceClassification.from_pretrained(directory / "export", dtype=torch.float32)
    assert critic.config.num_labels == 1
    row = layouts_run.rows()[0]
    with torch.no_grad():
        hidden = critic.model(torch.from_numpy(row.token_ids)[None]).last_hidden_state[0]
        values = critic.score(hidden[row.num_prompt_tokens - 1 : -1])[:, 0].numpy()
    assert difference([values * row.loss_mask], [report.values_before_export[0]]) <= SCORE


def test_a_cluster_refuses_a_layout_that_it_has_no_ranks_for(report: Report) -> None:
    assert report.refusal == "this cluster was started with another critic.layout; start one for this run"
