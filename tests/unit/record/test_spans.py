"""A sample's life becomes a trace, whose times are those of its requests, replies and stages; off, nothing is kept."""

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from megarl.record.metrics import Stage
from megarl.record.spans import SpanSender
from megarl.types import Reward, sample_times
from megarl.types.sample_times import SAMPLE_TIMES, SampleTimes
from tests.helpers.rollouts import random_rollout


def test_nothing_is_kept_unless_asked_for() -> None:
    times = SampleTimes()
    with times.part("request", "a", 0):
        pass
    assert times.take("a", 0) == []


def test_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_times, "MOST_SAMPLES", 2)
    times = SampleTimes()
    times.is_kept = True
    for i in range(3):
        with times.part("request", "a", i):
            pass
    assert [len(times.take("a", i)) for i in range(3)] == [0, 1, 1]


def test_a_trace_of_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    sender = SpanSender("http://127.0.0.1:9/v1/traces", "made", exporter)
    sample = random_rollout().samples[0]
    clock = iter(range(10, 90, 10))
    monkeypatch.setattr(sample_times.time, "time_ns", lambda: next(clock) * 1_000_000_000)
    for name in ("request", "tools", "request"):
        with SAMPLE_TIMES.part(name, sample.uid, sample.sample_index):
            pass
    stages = [Stage("gen", 0, 62), Stage("reward", 62, 65), Stage("update_actor", 66, 80), Stage("step", 0, 81)]
    sender.send(3, [sample], [Reward(score=0.5, correct=False)], stages)
    sender.close()
    *parts, whole = exporter.get_finished_spans()
    found = [(each.name, each.start_time // 10**9, each.end_time // 10**9) for each in (*parts, whole)]
    assert found == [
        ("request", 10, 20),
        ("tools", 30, 40),
        ("request", 50, 60),
        ("reward", 60, 65),
        ("update_actor", 66, 80),
        ("sample", 10, 80),
    ]
    assert {each.parent.span_id for each in parts} == {whole.context.span_id}
    assert whole.attributes["megarl.reward"] == 0.5
    assert whole.attributes["megarl.step"] == 3
    assert not SAMPLE_TIMES.is_kept
