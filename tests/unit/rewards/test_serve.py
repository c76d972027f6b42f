"""`megarl serve-reward`: the format on a socket, its limits, and how it ends."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from megarl.cli import main
from megarl.config.mixture import RemoteConfig
from megarl.errors import ConfigError, RunError
from megarl.rewards.question import Question, Verdict
from megarl.rewards.remote import RemoteJudge
from megarl.rewards.serve import PATH, RewardService, ServeOptions, encode_reply
from megarl.rewards.wire import decode_reply
from megarl.types import Reward
from tests.helpers.http_flood import flood
from tests.helpers.reward_items import item
from tests.helpers.waiting import wait_until

BODY = {"query": ["?#### 4", "?#### 5", "?four"], "prompts": ["?"] * 3, "labels": ["4"] * 3}
FILE = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "boom":
        raise KeyError("boom")
    time.sleep(1.5)
    return float(solution_str == ground_truth)
"""


@contextlib.contextmanager
def serving(directory: Path, *arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process of a service that has 512 descriptors, and its URL."""
    megarl = str(Path(sys.executable).with_name("megarl"))
    process = subprocess.Popen(
        ["sh", "-c", 'ulimit -n 512; exec "$0" serve-reward --port 0 "$@"', megarl, *arguments],
        cwd=directory,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    found = re.match(r"rewards at (\S+),", process.stdout.readline())
    try:
        assert found is not None
        yield process, found.group(1)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its URL. Source `slow` is judged by a file that takes 1.5 s."""
    directory = tmp_path_factory.mktemp("service")
    (directory / "slow.py").write_text(FILE)
    settings = [
        "rewards.custom={path: slow.py, name: compute_score}",
        "rewards.sources={openai/gsm8k: {scorer: openai/gsm8k, wrong: -1}}",
        "rewards.verifier.workers=1",
    ]
    with serving(directory, "--max-rows", "4", "--data-source", "openai/gsm8k", *settings) as started:
        yield started


def post(url: str, body: Any) -> httpx.Response:
    return httpx.post(url, json=body, timeout=60.0, trust_env=False)


def test_answers(service: tuple[subprocess.Popen[str], str]) -> None:
    """Also to clients that send no data source."""
    answer = post(service[1], BODY)
    assert answer.status_code == 200
    assert answer.json() == {
        "rewards": [1.0, -1.0, -1.0],
        "scores": [1.0, 0.0, 0.0],
        "extra_logs": {"parse_failed": [0.0, 0.0, 1.0], "timed_out": [0.0] * 3, "crashed": [0.0] * 3},
        "no_opinion": ["custom/score"],
    }


def test_it_is_what_a_run_asks(service: tuple[subprocess.Popen[str], str]) -> None:
    judge = RemoteJudge(RemoteConfig(urls=(service[1],)))
    judging = judge.begin()
    for response in ("#### 4", "#### 5"):
        judging.add(item("?", response, "4", source="openai/gsm8k"))
    judged = judge.finish([judging])
    judge.close()
    assert [(reward.score, reward.correct) for reward in judged.rewards] == [(1.0, True), (-1.0, False)]
    assert judged.tallies["reward/remote/failed_attempts"].value == 0


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"query": ["a"], "prompts": ["a"]}, "labels: expected a list of strings"),
        ({**BODY, "data_source": ["openai/gsm8k"]}, "data_source: got 1 rows, expected 3, those of query"),
    ],
)
def test_what_is_not_in_the_format(service: tuple[subprocess.Popen[str], str], body: Any, reason: str) -> None:
    answer = post(service[1], body)
    assert (answer.status_code, answer.json()) == (422, {"error": reason})
    broken = httpx.post(service[1], content=b"{", timeout=60.0, trust_env=False)
    assert (broken.status_code, broken.json()["error"][:12]) == (400, "got no JSON:")


@pytest.mark.parametrize("depth", [100, 400, 900, 5000])
def test_nested_columns_fail_no_request_but_their_own(service: tuple[subprocess.Popen[str], str], depth: int) -> None:
    nested = '{"a":' * depth + "1" + "}" * depth
    content = json.dumps({**BODY, "extra_info": ["HERE", {}, {}]}).replace('"HERE"', nested)
    answer = httpx.post(service[1], content=content, timeout=60.0, trust_env=False)
    assert answer.status_code in (200, 400), answer.text
    assert post(service[1], BODY).json()["rewards"] == [1.0, -1.0, -1.0]


def test_it_goes_on_beside_500_idle_connections_and_40_bodies_that_do_not_end(
    service: tuple[subprocess.Popen[str], str],
) -> None:
    process = psutil.Process(service[0].pid)
    before = process.memory_info().rss
    with flood(service[1]):
        for _ in range(3):
            assert post(service[1], BODY).json()["rewards"] == [1.0, -1.0, -1.0]
        assert process.memory_info().rss - before <= 32 << 20
        assert process.num_fds() < 512


KEY = "0123456789abcdef"


def test_a_service_for_other_machines_asks_for_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("--host", "0.0.0.0", "--api-key-env", "SERVICE_KEY", "--data-source", "openai/gsm8k")
    with serving(tmp_path, *arguments, "rewards.verifier.workers=1", SERVICE_KEY=KEY) as (_, url):
        url = url.replace("0.0.0.0", "127.0.0.1")
        address = urlsplit(url).netloc
        for sent in ({}, {"authorization": f"Bearer {KEY}x"}, {"authorization": f"Basic {KEY}"}):
            # Refused before a body that is announced, and never sent.
            with contextlib.closing(HTTPConnection(address, timeout=60)) as connection:
                connection.request("POST", PATH, headers={**sent, "content-length": "1000"})
                refused = connection.getresponse()
                assert (refused.status, refused.headers["www-authenticate"]) == (401, "Bearer")

        def ask(variable: str | None) -> list[float]:
            with contextlib.closing(RemoteJudge(RemoteConfig(urls=(url,), api_key_env=variable))) as judge:
                judging = judge.begin()
                judging.add(item("?", "#### 4", "4", source="openai/gsm8k"))
                return [reward.score for reward in judge.finish([judging]).rewards]

        monkeypatch.setenv("RIGHT", KEY)
        monkeypatch.setenv("WRONG", KEY[::-1])
        assert ask("RIGHT") == [1.0]
        for variable in (None, "WRONG"):
            with pytest.raises(RunError, match=r"all services refuse .*status 401; .*api_key_env"):
                ask(variable)


@pytest.mark.parametrize(
    ("key", "got"),
    [(None, "nothing"), ("short", "5 characters"), (f"{KEY} {KEY}", "33"), (f"{KEY}\n", "17"), (f"{KEY}é", "17")],
)
def test_a_key_that_is_none(key: str | None, got: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message does not show it."""
    if key is not None:
        monkeypatch.setenv("A_KEY", key)
    with pytest.raises(
        ConfigError, match=rf"^rewards.remote.api_key_env: .* A_KEY holds {got}.*openssl rand"
    ) as raised:
        RemoteJudge(RemoteConfig(urls=("http://judge",), api_key_env="A_KEY"))
    assert KEY not in str(raised.value)


def test_a_function_that_fails_on_one_row(service: tuple[subprocess.Popen[str], str]) -> None:
    body = {**BODY, "data_source": ["slow"] * 3, "query": ["?4", "?boom", "?5"]}
    answer = post(service[1], body)
    assert (answer.status_code, answer.json()["rewards"]) == (200, [1.0, None, 0.0])
    assert "boom" in answer.json()["extra_logs"]["unjudged"][1]


def test_busy_refuses_and_a_stop_finishes_what_has_begun(service: tuple[subprocess.Popen[str], str]) -> None:
    """Last: it ends the service."""
    process, url = service
    slow = {**BODY, "data_source": ["slow"] * 3, "query": ["?4", "?4", "?5"]}
    with ThreadPoolExecutor(1) as thread:
        begun: Future[httpx.Response] = thread.submit(post, url, slow)
        health = url.replace(PATH, "/health")

        def state() -> dict[str, Any]:
            assert not begun.done()
            return httpx.get(health, timeout=60.0, trust_env=False).json()

        wait_until(lambda: state()["rows_in_work"] == 3, "three rows in work", seen=state)
        refused = post(url, BODY)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        process.send_signal(signal.SIGTERM)
        assert begun.result().json()["rewards"] == [1.0, 1.0, 0.0]
    assert process.wait(60.0) == 0


class Instant:
    """A judge without processes, and its session."""

    def begin(self) -> "Instant":
        self.num_rows = 0
        return self

    def ask(self, question: Question, *, label: str) -> None:
        self.num_rows += 1

    def pending(self) -> list[Future[Any]]:
        return []

    def verdicts(self, sessions: Sequence["Instant"]) -> list[Verdict]:
        return [Verdict(reward=Reward(score=1.0, correct=True), outcome="correct")] * self.num_rows


def test_a_request_beyond_the_bound_is_taken_when_nothing_else_is_in_work() -> None:
    options = ServeOptions(max_rows=1, data_source="openai/gsm8k")
    app = RewardService(Instant(), options).app()  # type: ignore[arg-type]

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://service") as client:
            return await client.post(PATH, json=BODY)

    assert asyncio.run(ask()).json()["rewards"] == [1.0, 1.0, 1.0]


def test_details_that_only_some_rows_have_are_left_out() -> None:
    rewards = [
        Reward(score=1.0, correct=True, details={"a": 1.0, "b": 2.0}),
        Reward(score=0.0, correct=False, details={"a": 3.0}),
    ]
    verdicts = [Verdict(reward=reward, outcome="correct") for reward in rewards]
    assert encode_reply(verdicts)["extra_logs"] == {
        "a": [1.0, 3.0],
        **{name: [0.0, 0.0] for name in ("timed_out", "parse_failed", "crashed")},
    }


def test_a_function_without_an_opinion_in_any_row_is_named() -> None:
    """Otherwise estimators that need its number would take it for forgotten. Other trainers get no columns of nulls."""
    rewards = [
        Reward(score=1.0, correct=True, details={"a/score": 1.0}, no_opinion=("b/score", "c/score")),
        Reward(score=0.0, correct=False, details={"c/score": 3.0}, no_opinion=("a/score", "b/score")),
    ]
    reply = encode_reply([Verdict(reward=reward, outcome="correct") for reward in rewards])
    assert reply["no_opinion"] == ["b/score"]
    assert {name: reply["extra_logs"].get(name) for name in ("a/score", "b/score", "c/score")} == {
        "a/score": [1.0, None],
        "b/score": None,
        "c/score": [None, 3.0],
    }
    decoded = decode_reply(json.loads(json.dumps(reply)), 2)
    for row, reward in enumerate(rewards):
        assert reward.details.items() <= decoded.reward(row).details.items()
        assert sorted(decoded.reward(row).no_opinion) == sorted(reward.no_opinion)


def test_a_row_that_fails_costs_no_other() -> None:
    """What the rule could not judge is null in the reply, with the reason, and is dropped where it was asked for."""
    good = Verdict(reward=Reward(score=0.5, correct=True, details={"a": 1.0}), outcome="correct")
    reply = encode_reply([good, Verdict(reward=None, outcome="failed", reason="KeyError: 'x' in mine.py:3")])
    assert (reply["rewards"], reply["scores"]) == ([0.5, None], [1.0, None])
    assert reply["extra_logs"]["unjudged"] == ["", "failed: KeyError: 'x' in mine.py:3"]
    decoded = decode_reply(json.loads(json.dumps(reply)), 2)
    assert (decoded.reward(0).score, decoded.reward(0).correct) == (0.5, True)
    assert decoded.reward(0).details["a"] == 1.0
    assert decoded.reward(1).dropped
    assert decoded.notes["unjudged"][1] == "failed: KeyError: 'x' in mine.py:3"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rewards.verifier.hard_limit_s=1"], "rewards.verifier.hard_limit_s: got 1.0, expected more than"),
        (["--data-source", "chess"], "unknown data source 'chess'"),
        (["rewards.custom.path=nowhere.py"], "nowhere.py: no such file"),
        (["--host", "0.0.0.0"], "--host: got '0.0.0.0', where other machines reach the service, expected a key"),
        (["--host", ""], "--host: got '', where other machines reach the service, expected a key"),
        (["--host", "::"], "--host: got '::', where other machines reach the service, expected a key"),
        (["--api-key-env", "NO_SUCH_KEY"], "--api-key-env: the environment variable NO_SUCH_KEY holds nothing"),
    ],
)
def test_bad_settings_start_nothing(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["serve-reward", *arguments])
    assert left.value.code == 2
    assert message in capsys.readouterr().err
