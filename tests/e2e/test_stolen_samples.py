"""Two real engines, of which the one that runs idle takes over samples of the other."""

from pathlib import Path

import pytest

from megarl.types import SegmentSource
from tests.e2e import stolen_run
from tests.e2e.support import largest_difference
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.rank_pool import RankPool

NATS = 1e-5


@pytest.mark.timeout(300)
def test_stolen_samples_have_the_log_probs_of_a_forward_pass_and_regenerate(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", tied=True)
    # Ray, which the process of the tests may have already, starts once in a process.
    with RankPool(1, timeout_s=240.0) as pool:
        found: stolen_run.Stolen = pool.run(stolen_run.run, str(model), str(tmp_path))[0]
    samples = found.samples
    assert {each.source for s in samples for each in s.segments[1:]} == {SegmentSource.POLICY}
    assert sum(len(s.segments) - 2 for s in samples) == found.num_moved >= 1
    given = [each[len(s.prompt_token_ids) - 1 :] for s, each in zip(samples, found.forward, strict=True)]
    assert largest_difference([s.rollout_logprobs for s in samples], given) <= NATS
    # A token takes 2 · 4 bytes for each of 32 numbers of two heads in two layers; a block may be set aside.
    capacity = (64 << 20) // (2 * 4 * 32 * 2 * 2)
    assert len(found.kv_tokens) == 2
    assert all(capacity - 32 <= kv_tokens <= capacity for kv_tokens in found.kv_tokens)
