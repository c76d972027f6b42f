"""An agent attacks the endpoint that it shares with others: it learns nothing of them, and they go on."""

import asyncio
import json
import socket
from typing import Any
from urllib.parse import urlsplit

import pytest

from megarl.environments.base import Action
from megarl.environments.chat import Chat
from megarl.environments.endpoint import MAX_REQUEST_BYTES, chat_server
from megarl.types import Prompt
from tests.helpers.agent_talk import converse

ASK = json.dumps({"messages": [{"role": "user", "content": "1+2?"}]}).encode()
SECRET = "The victim's secret."
PATH = "/v1/chat/completions"


def sent(url: str, *parts: bytes) -> bytes:
    """Return all that a server answers to bytes as they are; no client library changes a path."""
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=100) as connection:
        connection.settimeout(100)
        received = b""
        try:
            for part in parts:
                connection.sendall(part)
            while part := connection.recv(1 << 16):
                received += part
        except OSError:
            pass  # It was closed before all of it was sent.
        return received


def request(target: str, body: bytes = ASK, *, method: str = "POST", host: str = "a") -> bytes:
    head = f"{method} {target} HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    return head.encode() + body


def attack(*attempts: Any) -> tuple[list[bytes], dict[str, object]]:
    """Let an agent send attempts, made of its own key and a victim's; return the answers and the findings.

    The victim has asked for a turn, which it gets after all of them.
    """
    received: list[bytes] = []

    async def play() -> dict[str, object]:
        victim = Chat(None)
        url = chat_server().open(victim)
        theirs = asyncio.create_task(asyncio.to_thread(sent, url, request(f"/s/{victim.key}{PATH}")))
        (asked,) = await victim.next_questions()
        assert asked.context[0].content == "1+2?"

        def agent(prompt: Prompt, base_url: str, api_key: str) -> float:
            own = urlsplit(base_url).path.split("/")[2]
            for attempt in attempts:
                received.append(sent(base_url, *attempt(own, victim.key)))
            assert b"200 OK" in sent(base_url, request(f"/s/{own}{PATH}"))
            return 1.0

        talk = await converse({"agent": agent}, "3", reply_timeout_s=500.0)
        assert (talk.last.done, talk.last.failure) == (True, ""), talk.last
        # Nobody took its turn, and nobody asked for another.
        victim.answer([Action(text=SECRET, turn=0)])
        assert SECRET.encode() in await theirs
        chat_server().close(victim)
        return dict(talk.last.details)

    details = asyncio.run(play())
    assert not any(SECRET.encode() in each for each in received)
    return received, details


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


def test_others_are_found_by_no_path_that_lacks_their_key() -> None:
    """Also by one that has nearly all of it, and their key is in no answer."""
    keys: list[str] = []

    def paths(own: str, theirs: str) -> list[str]:
        keys[:] = [own, theirs]
        near = [theirs[:-1], theirs.swapcase(), theirs + "=", theirs[:-1] + "%00", theirs[:-1] + "*", "*", "", "%"]
        rooted = [f"/s/{each}{PATH}" for each in near]
        through = [f"/s/{own}/..{PATH}", f"/s/{own}/%2e%2e{PATH}", f"/s/{own}%2F..%2F{PATH}", f"/s/../s{PATH}"]
        return [*rooted, *through, "/", "/s", "/s/", "/docs", "/openapi.json", "/metrics", "//s//", "/%73/" + PATH]

    count = len(paths("own", "theirs"))
    attempts = [lambda own, theirs, i=i: [request(paths(own, theirs)[i])] for i in range(count)]
    answers, _ = attack(*attempts)
    assert {status(each) for each in answers} <= {400, 404, 405}
    assert not any(keys[1].encode() in each for each in answers)


def test_a_host_header_or_another_form_of_a_path_leads_nowhere_else() -> None:
    answers, details = attack(
        lambda own, theirs: [request(f"/s/{own}/v1/nothing", host=f"127.0.0.1/s/{theirs}")],
        lambda own, theirs: [request(f"http://127.0.0.1/s/{theirs[:-2]}{PATH}")],
        lambda own, theirs: [
            request(
                f"/s/{own}/v1/responses",
                json.dumps({"input": "a", "previous_response_id": "resp_0"}).encode(),
                host="evil",
            )
        ],
        lambda own, theirs: [
            b"POST /s/" + own.encode() + b"/v1/messages HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n"
            b"transfer-encoding: chunked\r\n\r\n0\r\n\r\nGET / HTTP/1.1\r\n\r\n"
        ],
    )
    assert [status(each) for each in answers[:3]] == [404, 404, 400]
    assert status(answers[3]) in (0, 400)
    assert details["refused_requests"] == 2


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"[" * 1_000_000, 400),
        (b'{"messages": ' + b"9" * 1_000_000 + b"}", 400),
        (b'{"messages": [' + b"{}," * 300_000 + b"{}]}", 400),
        (b'{"messages": [{"role": "user", "content": "a"}], "stop": [' + b'"b",' * 300_000 + b'"b"]}', 400),
        (b'{"messages": [{"role": "user", "content": "a"}], "n": 1e400}', 400),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400),
    ],
    ids=["nested", "long number", "many messages", "many stop texts", "no number", "half a character"],
)
def test_bodies_that_are_made_to_harm_are_refused_and_counted(body: bytes, code: int) -> None:
    answers, details = attack(lambda own, theirs: [request(f"/s/{own}{PATH}", body)])
    assert [status(each) for each in answers] == [code]
    assert details == {"refused_requests": 1}


def test_a_huge_body_is_refused_before_it_is_sent_and_a_body_without_a_length_when_it_is_too_long() -> None:
    part = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
    answers, details = attack(
        lambda own, theirs: [
            f"POST /s/{own}{PATH} HTTP/1.1\r\nhost: a\r\ncontent-length: {MAX_REQUEST_BYTES + 1}\r\n"
            "connection: close\r\n\r\n".encode()
        ],
        lambda own, theirs: [
            f"POST /s/{own}{PATH} HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n".encode(),
            *[part] * ((MAX_REQUEST_BYTES >> 20) + 1),
        ],
    )
    assert status(answers[0]) == 413
    assert status(answers[1]) in (0, 413)
    assert details["refused_requests"] == 2


def test_each_of_300_refused_requests_is_counted() -> None:
    answers, details = attack(*[lambda own, theirs: [request(f"/s/{own}/v1/nothing")]] * 300)
    assert {status(each) for each in answers} == {404}
    assert details == {"refused_requests": 300}
