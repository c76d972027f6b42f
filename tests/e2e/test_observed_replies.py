"""A run that predicts what its environment says: killed and resumed, and sampled again, it is equal to the bit."""

from pathlib import Path

import numpy as np
import pytest

from megarl.data.chat import load_tokenizer
from megarl.rollout.replay import read_record, record_path
from megarl.types import SegmentSource
from tests.helpers.kill_resume import SmallRun, assert_survives, make_inputs

NUM_STEPS = 3
ENVIRONMENT = f"{Path(__file__).with_name('asking.py')}:Asking"
SETTINGS = (
    f"trainer.total_steps={NUM_STEPS}",
    f"environment.default={ENVIRONMENT}",
    "environment.max_turn_tokens=8",
    "rollout.max_response_tokens=96",
    "rewards.manager=environment",
    "rollout.record=true",
)
ECHO = "algo.echo_coef=0.1"


@pytest.mark.timeout(1200)
def test_a_killed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path)
    whole = SmallRun(inputs=inputs, name="whole", settings=(*SETTINGS, ECHO))
    assert whole.start().wait() == 0, whole.paths.root.with_suffix(".log").read_text()
    losses = [record.metrics["actor/echo_loss"] for record in whole.records() if "actor/grad_norm" in record.metrics]
    # Random weights know nothing of the 264 tokens, and learn what is always said.
    assert losses[0] == pytest.approx(np.log(264), rel=0.2)
    assert losses == sorted(losses, reverse=True)
    tokenizer = load_tokenizer(str(inputs / "model"))
    for step in range(1, NUM_STEPS + 1):
        for sample in read_record(record_path(whole.paths.records, step)).samples:
            replies = [s for s in sample.segments if s.source is SegmentSource.ENVIRONMENT]
            num_tokens = len(sample.segments[1].token_ids)
            assert [tokenizer.decode(s.token_ids[s.observed]) for s in replies] == [
                f"that has {num_tokens} tokens; again"
            ]
    assert_survives(whole)
