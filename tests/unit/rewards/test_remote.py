"""Services over HTTP: real sockets, services that are gone, slow or wrong, and what becomes of their rows.

A row's reward is the length of its label, i + 1 for row i, so an answer shows whose it is.
"""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from megarl.config.mixture import RemoteConfig
from megarl.errors import DataError, RunError
from megarl.rewards.judge import Judged
from megarl.rewards.remote import RemoteJudge
from megarl.types import Reward
from tests.helpers.reward_items import item
from tests.helpers.reward_server import Behaviour, RewardServer, lengths, reply

# No waiting in between unless a test is about it.
QUICK: dict[str, Any] = {"timeout_s": 5.0, "retries": 0, "backoff_s": 0.0}


@contextmanager
def judge_of(*urls: str, **settings: Any) -> Iterator[RemoteJudge]:
    judge = RemoteJudge(RemoteConfig(urls=urls, **{**QUICK, **settings}))
    try:
        yield judge
    finally:
        judge.close()


def judged(judge: RemoteJudge, num_rows: int) -> Judged:
    judging = judge.begin()
    for row in range(num_rows):
        judging.add(item(f"q{row}", "answer", "x" * (row + 1)))
    return judge.finish([judging])


def scores(result: Judged) -> list[float | None]:
    """None for a dropped row."""
    return [None if reward.dropped else reward.score for reward in result.rewards]


def counted(result: Judged, name: str) -> float:
    return result.tallies[f"reward/remote/{name}"].value


def test_rewards_come_in_the_order_of_rows_from_all_services() -> None:
    with RewardServer() as one, RewardServer() as two, judge_of(one.url, two.url) as judge:
        result = judged(judge, 5)
    assert scores(result) == [1.0, 2.0, 3.0, 4.0, 5.0]
    # Five rows that no full request took are dealt out over both.
    assert [[len(body["labels"]) for body in server.requests] for server in (one, two)] == [[3], [2]]
    assert (counted(result, "requests"), counted(result, "failed_attempts")) == (2.0, 0.0)
    assert result.tallies["perf/reward_remote_latency_s"].value > 0


def test_a_full_request_does_not_wait_for_the_others() -> None:
    with RewardServer() as one, RewardServer() as two, judge_of(one.url, two.url, rows_per_request=2) as judge:
        judging = judge.begin()
        for row in range(2):
            judging.add(item(f"q{row}", "answer", "x" * (row + 1)))
        assert one.arrived.wait(5.0)
        for row in range(2, 5):
            judging.add(item(f"q{row}", "answer", "x" * (row + 1)))
        result = judge.finish([judging])
    assert scores(result) == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert [[body["labels"] for body in server.requests] for server in (one, two)] == [
        [["x", "xx"], ["xxxxx"]],
        [["xxx", "xxxx"]],
    ]


def test_no_request_takes_rows_of_two_sessions() -> None:
    """Services take turns within a session; what is left of the first goes out before what is left of the second."""
    with RewardServer() as one, RewardServer() as two, judge_of(one.url, two.url, rows_per_request=2) as judge:
        sessions = [judge.begin(), judge.begin()]
        for row in range(8):
            sessions[row >= 3].add(item(f"q{row}", "answer", "x" * (row + 1)))
        assert [len(session.pending()) for session in sessions] == [1, 2]
        result = judge.finish(sessions)
    assert scores(result) == [float(row + 1) for row in range(8)]
    sizes = [sorted([len(label) for label in body["labels"]] for body in server.requests) for server in (one, two)]
    assert sizes == [[[1, 2], [4, 5], [8]], [[3], [6, 7]]]


def test_nothing_to_judge() -> None:
    with RewardServer() as server, judge_of(server.url) as judge:
        assert judged(judge, 0).rewards == []
    assert server.requests == []


BAD: dict[str, Behaviour] = {
    "status 500": lambda body: (500, b"{}"),
    "no JSON": lambda body: (200, b"<html>"),
    "too few": lambda body: reply(rewards=[1.0] * (len(body["labels"]) - 1)),
    "wrong type": lambda body: reply(rewards=["1.0"] * len(body["labels"])),
    "NaN": lambda body: (200, json.dumps({"rewards": [float("nan")] * len(body["labels"])}).encode()),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_wrong_answer_is_none(kind: str) -> None:
    """Rows are dropped, and nothing of the answer is taken; a service beside it judges them all."""
    with RewardServer(BAD[kind]) as bad, RewardServer() as good:
        with judge_of(bad.url) as judge:
            result = judged(judge, 2)
        assert scores(result) == [None, None]
        assert (counted(result, "failed_attempts"), counted(result, "unjudged_rows")) == (1.0, 2.0)
        assert counted(result, "unjudged_frac") == 1.0
        assert [(each.item.label, each.outcome) for each in result.troubles] == [
            ("q0/0", "unanswered"),
            ("q1/0", "unanswered"),
        ]
        assert result.troubles[0].reason.startswith(bad.url)
        with judge_of(bad.url, good.url) as judge:
            result = judged(judge, 4)
        assert scores(result) == [1.0, 2.0, 3.0, 4.0]
        assert (counted(result, "failed_attempts"), counted(result, "unjudged_rows")) == (1.0, 0.0)


@pytest.mark.parametrize("kind", ["status 500", "NaN"])
def test_what_happens_to_rows_that_nobody_judges_is_said(kind: str) -> None:
    with RewardServer(BAD[kind]) as bad:
        with judge_of(bad.url, on_error="value", value=0.25) as judge:
            assert judged(judge, 2).rewards == [Reward(score=0.25, correct=False)] * 2
        with (
            judge_of(bad.url, on_error="raise", retries=1) as judge,
            pytest.raises(RunError, match=r"no service judged 2 rows after 2 attempts, the last: http.*rewards.remote"),
        ):
            judged(judge, 2)


@pytest.mark.parametrize("on_error", [{}, {"on_error": "value", "value": 0}])
def test_services_that_refuse_every_row_end_the_run_at_once(on_error: dict[str, Any]) -> None:
    """A wrong path drops no rows for the rest of the run; a service beside it that works is enough."""
    with RewardServer(lambda body: (404, b"")) as wrong, RewardServer(lambda body: (401, b"")) as closed:
        with judge_of(wrong.url, closed.url, retries=3, **on_error) as judge:
            with pytest.raises(RunError, match=r"all services refuse the rows of this run, the last: http.*status 40"):
                judged(judge, 1)
            assert len(wrong.requests) == len(closed.requests) == 1
        with RewardServer() as good, judge_of(wrong.url, good.url) as judge:
            assert scores(judged(judge, 2)) == [1.0, 2.0]
        with RewardServer(BAD["status 500"]) as bad, judge_of(wrong.url, bad.url) as judge:
            assert scores(judged(judge, 1)) == [None]


def test_half_of_the_services_are_down() -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(RewardServer()) for _ in range(4)]
        urls = [server.url for server in servers]
        for server in servers[:2]:
            server.kill()
        with judge_of(*urls) as judge:
            result = judged(judge, 12)
    assert scores(result) == [float(row + 1) for row in range(12)]
    assert counted(result, "unjudged_rows") == 0.0
    assert sum(len(body["labels"]) for server in servers[2:] for body in server.requests) == 12


def test_all_services_are_down_and_come_back() -> None:
    """The second round finds the service."""
    answers = iter([(503, b""), (503, b"")])
    with RewardServer(lambda body: next(answers, None) or lengths(body)) as server:
        with judge_of(server.url, retries=2, backoff_s=0.01) as judge:
            result = judged(judge, 2)
        assert scores(result) == [1.0, 2.0]
        assert counted(result, "failed_attempts") == 2.0


def test_a_service_is_killed_while_it_judges() -> None:
    with RewardServer(delay_s=60.0) as doomed, RewardServer() as other, judge_of(doomed.url, other.url) as judge:
        killer = threading.Thread(target=lambda: (doomed.arrived.wait(5.0), doomed.kill()))
        killer.start()
        result = judged(judge, 6)
        killer.join()
    assert scores(result) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert counted(result, "failed_attempts") == 1.0


@pytest.mark.parametrize("slowness", [{"delay_s": 30.0}, {"byte_s": 0.05}])
def test_slow_services_are_left_behind(slowness: dict[str, float]) -> None:
    """The limit is on the whole answer: one that drips byte by byte is slow too."""
    began = time.monotonic()
    with RewardServer(**slowness) as slow:
        with judge_of(slow.url, timeout_s=0.3) as judge:
            result = judged(judge, 2)
        assert scores(result) == [None, None]
        with RewardServer() as quick, judge_of(slow.url, quick.url, timeout_s=3.0) as judge:
            assert scores(judged(judge, 2)) == [1.0, 2.0]
    assert time.monotonic() - began < 25.0


def test_rounds_wait_longer_and_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def note(seconds: float) -> None:
        waits.append(seconds)

    with RewardServer(BAD["status 500"]) as bad, judge_of(bad.url, retries=4, backoff_s=0.5) as judge:
        monkeypatch.setattr("megarl.rewards.remote.asyncio.sleep", note)
        assert scores(judged(judge, 1)) == [None]
    assert len(bad.requests) == 5
    # 0.5 · 2ⁿ, times something from 0.5 to 1.5.
    assert [0.5 <= wait / (0.5 * 2**n) <= 1.5 for n, wait in enumerate(waits)] == [True] * 4
    assert len({wait / 2**n for n, wait in enumerate(waits)}) == 4


def test_logs_of_a_service_are_metrics() -> None:
    logs = {"depth": [1, 4]}
    with (
        RewardServer(lambda body: reply(rewards=[0.0, 1.0], extra_logs=logs)) as server,
        judge_of(server.url) as judge,
    ):
        result = judged(judge, 2)
    assert counted(result, "depth") == 2.5
    assert [reward.details for reward in result.rewards] == [{"depth": 1.0}, {"depth": 4.0}]


def test_what_cannot_be_sent_says_so() -> None:
    """An error of the data, not of services."""
    with RewardServer() as server, judge_of(server.url) as judge:
        judging = judge.begin()
        judging.add(item("q", "a", "1", extra_info={"x": object()}))
        with pytest.raises(DataError, match="samples q/0 to q/0"):
            judge.finish([judging])
    assert server.requests == []


def unable(body: dict[str, Any]) -> tuple[int, bytes]:
    """Judges all rows but those whose label is xx."""
    rewards = [None if label == "xx" else 1.0 for label in body["labels"]]
    return reply(
        rewards=rewards, scores=rewards, extra_logs={"unjudged": ["no file" if r is None else "" for r in rewards]}
    )


@pytest.mark.parametrize(("settings", "expected"), [({}, None), ({"on_error": "value", "value": -1.0}, -1.0)])
def test_a_row_that_a_service_cannot_judge_costs_no_other(settings: dict[str, Any], expected: float | None) -> None:
    with RewardServer(unable) as server, judge_of(server.url, **settings) as judge:
        result = judged(judge, 3)
    assert scores(result) == [1.0, expected, 1.0]
    assert [(trouble.item.prompt.ground_truth, trouble.reason) for trouble in result.troubles] == [("xx", "no file")]
    assert (counted(result, "requests"), counted(result, "failed_attempts")) == (1.0, 0.0)
    assert (counted(result, "unjudged_rows"), result.rewards[0].notes) == (1.0, {})


def test_a_row_without_a_reward_ends_the_run_where_that_is_wanted() -> None:
    expected = pytest.raises(RunError, match=r"a service could not judge sample .*: no file; mend the service")
    with RewardServer(unable) as server, judge_of(server.url, on_error="raise") as judge, expected:
        judged(judge, 3)
