"""Metrics of conversations, by hand."""

import pytest

from megarl.record.episodes import episode_metrics
from megarl.types import Episode, FinishReason, Sample, prompt_segment


def sample(episode: Episode | None) -> Sample:
    return Sample(
        uid="a",
        sample_index=0,
        seed=0,
        segments=(prompt_segment([1]),),
        finish_reason=FinishReason.STOP,
        episode=episode,
    )


def test_turns_tools_time_and_failures_are_counted() -> None:
    episodes = [
        Episode(environment="g", num_turns=3, num_calls=2, seconds=1.0, details={"tool_errors": 1, "correct": True}),
        Episode(environment="g", num_turns=1, details={"correct": False, "why": "text", "nan": float("nan")}),
        Episode(environment="g", num_turns=1, failure="raised", reason="KeyError", num_restarts=1),
        Episode(environment="g", num_turns=3, failure="timed_out", seconds=2.0),
    ]
    got = episode_metrics([sample(None), *map(sample, episodes)])
    assert got == pytest.approx(
        {
            "environment/turns/mean": 2.0,
            "environment/turns/min": 1.0,
            "environment/turns/max": 3.0,
            "environment/tool_calls": 0.5,
            "perf/environment_reply_s": 0.75,
            "environment/failed_frac": 0.5,
            "environment/raised": 1.0,
            "environment/timed_out": 1.0,
            "environment/died": 0.0,
            "environment/restarted": 1.0,
            # Of those that say something of the name.
            "environment/detail/tool_errors": 1.0,
            "environment/detail/correct": 0.5,
        }
    )
    assert episode_metrics([sample(None)]) == {}
