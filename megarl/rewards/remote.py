"""Rewards of HTTP services (`rewards.wire`). No service can stop a run by being slow, gone or wrong."""

import asyncio
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx

from megarl.config.rewards import RemoteConfig
from megarl.errors import DataError, RunError
from megarl.rewards.judge import Item, Judged, Tally, mean_of
from megarl.rewards.wire import BadReplyError, Reply, decode_reply, encode_request
from megarl.types import DROPPED, Reward

T = TypeVar("T")

# A service answers with a few numbers per row.
MAX_REPLY_BYTES = 64 << 20
_CLOSE_S = 5.0
_HEADERS = {"content-type": "application/json"}


class _Loop:
    """An event loop in a thread of its own, so that requests are under way while the caller works."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="remote rewards", daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)
        self._loop.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """What became of a request: no reply if every service failed it each time. `failures` lists why."""

    reply: Reply | None
    seconds: float
    failures: Sequence[str]


@dataclass(slots=True, kw_only=True)
class _Request:
    """Rows that are sent together, and to which service first."""

    rows: list[Item]
    first: int
    answer: "Future[_Answer] | None" = None


class RemoteJudge:
    """Deals rows out over equal services.

    A request goes to the next service; if that fails it (no connection, no answer in time, an error status, an answer
    out of format), to the others in turn, those last that failed more often in this batch. When all have failed it, it
    waits backoff_s · 2ⁿ · (0.5 to 1.5) and tries all again, `retries` times. Then `on_error` says what happens.
    """

    def __init__(self, cfg: RemoteConfig, urls: Sequence[str], *, name: str = "remote") -> None:
        """`name` is the metrics'."""
        self.cfg, self.urls, self.name = cfg, tuple(urls), name
        # Unlike all else this must differ between runs: they would ask a service that comes back all at once.
        self._jitter = random.SystemRandom()
        self._loop = _Loop()
        self._client = self._loop.start(_open_client()).result()

    def begin(self) -> "RemoteJudging":
        return RemoteJudging(self)

    def close(self) -> None:
        self._loop.start(self._client.aclose()).result(_CLOSE_S)
        self._loop.close()

    def ask(self, rows: Sequence[Item], first: int, failed: Counter[str]) -> Future[_Answer]:
        """Send rows, to service number `first` before the others; `failed` counts failures by URL.

        DataError if JSON cannot hold them.
        """
        return self._loop.start(self._ask(_body(rows), len(rows), first, failed))

    async def _ask(self, body: bytes, num_rows: int, first: int, failed: Counter[str]) -> _Answer:
        began, failures = time.monotonic(), list[str]()
        start = first % len(self.urls)
        turns = [*self.urls[start:], *self.urls[:start]]
        for attempt in range(self.cfg.retries + 1):
            if attempt:
                await asyncio.sleep(self.cfg.backoff_s * 2 ** (attempt - 1) * self._jitter.uniform(0.5, 1.5))
            for url in sorted(turns, key=lambda url: failed[url]):
                try:
                    async with asyncio.timeout(self.cfg.timeout_s):
                        reply = decode_reply(await self._post(url, body), num_rows)
                except (httpx.HTTPError, TimeoutError, BadReplyError, ValueError) as error:
                    failed[url] += 1
                    failures.append(f"{url}: {_reason(error, self.cfg.timeout_s)}")
                    continue
                return _Answer(reply=reply, seconds=time.monotonic() - began, failures=failures)
        return _Answer(reply=None, seconds=time.monotonic() - began, failures=failures)

    async def _post(self, url: str, body: bytes) -> Any:
        """The JSON of an answer with a status of success."""
        async with self._client.stream("POST", url, content=body, headers=_HEADERS) as response:
            response.raise_for_status()
            content = bytearray()
            async for part in response.aiter_bytes():
                content += part
                if len(content) > MAX_REPLY_BYTES:
                    raise BadReplyError(f"got more than {MAX_REPLY_BYTES} bytes")
        return json.loads(content)


def _body(rows: Sequence[Item]) -> bytes:
    try:
        return json.dumps(encode_request(rows), allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise DataError(
            f"samples {rows[0].label} to {rows[-1].label}: their extra_info cannot be sent to a reward service: {error}"
        ) from error


async def _open_client() -> httpx.AsyncClient:
    # The time limit is on the whole of a request, not on its parts. A proxy is nothing that reward services stand
    # behind.
    return httpx.AsyncClient(timeout=None, trust_env=False, limits=httpx.Limits(max_connections=None))


def _reason(error: Exception, timeout_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {timeout_s} s"
    if isinstance(error, httpx.HTTPStatusError):
        return f"status {error.response.status_code}"
    return f"{type(error).__name__}: {error}" if isinstance(error, httpx.HTTPError) else str(error)


@dataclass(slots=True)
class RemoteJudging:
    """Sends a request as soon as it is full, and at the end the rest, dealt out over all services."""

    judge: RemoteJudge
    _requests: list[_Request] = field(default_factory=list)
    _waiting: list[Item] = field(default_factory=list)
    _failed: Counter[str] = field(default_factory=Counter)

    def add(self, item: Item) -> None:
        self._waiting.append(item)
        if len(self._waiting) == self.judge.cfg.rows_per_request:
            self._send(self._waiting)
            self._waiting = []

    def _send(self, rows: list[Item]) -> None:
        request = _Request(rows=rows, first=len(self._requests))
        request.answer = self.judge.ask(rows, request.first, self._failed)
        self._requests.append(request)

    def finish(self) -> Judged:
        """RunError with `on_error=raise` if no service answered."""
        size = -(-len(self._waiting) // len(self.judge.urls))
        for start in range(0, len(self._waiting), max(size, 1)):
            self._send(self._waiting[start : start + size])
        answers = [request.answer.result() for request in self._requests if request.answer is not None]
        rewards = [
            reward
            for request, answer in zip(self._requests, answers, strict=True)
            for reward in self._rewards(len(request.rows), answer)
        ]
        return Judged(rewards=rewards, tallies=self._tallies(answers, rewards))

    def _rewards(self, num_rows: int, answer: _Answer) -> list[Reward]:
        if answer.reply is not None:
            return [answer.reply.reward(row) for row in range(num_rows)]
        cfg = self.judge.cfg
        if cfg.on_error == "raise":
            raise RunError(
                f"rewards.remote: no service judged {num_rows} rows after {len(answer.failures)} attempts, the last: "
                f"{answer.failures[-1]}; start the services again and --resume, or set rewards.remote.on_error"
            )
        if cfg.on_error == "drop_rows":
            return [DROPPED] * num_rows
        assert cfg.value is not None, "the configuration was checked"
        return [Reward(score=cfg.value, correct=False)] * num_rows

    def _tallies(self, answers: Sequence[_Answer], rewards: Sequence[Reward]) -> dict[str, Tally]:
        name = f"reward/{self.judge.name}"
        lost = sum(len(r.rows) for r, a in zip(self._requests, answers, strict=True) if a.reply is None)
        logs = {key for reward in rewards for key in reward.details}
        return {
            f"{name}/requests": Tally(total=len(answers)),
            f"{name}/failed_attempts": Tally(total=sum(len(answer.failures) for answer in answers)),
            f"{name}/unjudged_rows": Tally(total=lost),
            f"perf/reward_{self.judge.name}_latency_s": mean_of(answer.seconds for answer in answers),
            **{
                f"{name}/{key}": mean_of(reward.details[key] for reward in rewards if key in reward.details)
                for key in sorted(logs)
            },
        }
