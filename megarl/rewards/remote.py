"""Get rewards from HTTP services in the format of `rewards.wire`; no slow or failing service can stall a run."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import httpx

from megarl.config.mixture import RemoteConfig
from megarl.errors import DataError, RunError
from megarl.host.clock import awake_s
from megarl.host.http_replies import BOUNDED
from megarl.host.masking import masked_text
from megarl.rewards.background import BackgroundLoop
from megarl.rewards.judge import Judged, Tally, mean_of
from megarl.rewards.wire import UNJUDGED, BadReplyError, ServiceReply, decode_reply, encode_request, read_service_key
from megarl.types import DROPPED, Reward
from megarl.types.judged import FinishedSample, Trouble

# Statuses of a wrong URL or a missing authorisation, which no retry and no other row changes.
_REFUSALS = (401, 403, 404, 405)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """The outcome of a request: `reply` is None if every service failed each time; `failures` lists why.

    is_refused: every service answered with a status of `_REFUSALS`.
    """

    reply: ServiceReply | None
    seconds: float
    failures: Sequence[str]
    is_refused: bool = False


class RemoteJudge:
    """A judge that distributes rows over equivalent HTTP services.

    If a service fails (no connection, no answer in time, an error status or a malformed answer), the request goes to
    the other services in turn, first to those with the fewest failures in this batch. If all fail, the judge waits
    backoff_s · 2ⁿ · (0.5 to 1.5) and tries all again, `retries` times. Then `on_error` decides what happens.
    """

    def __init__(self, cfg: RemoteConfig, *, name: str = "remote", section: str = "rewards.remote") -> None:
        """Open an HTTP client and the thread that it runs in; `name` becomes a part of metric names.

        section: where the configuration has the URLs and the key. Raises ConfigError if the key is not there.
        """
        self.cfg, self.urls, self.name = cfg, cfg.urls, name
        # Unlike other randomness, jitter must differ between runs, lest all retry a recovered service at the same time.
        self._jitter = random.SystemRandom()
        # The time limit applies to a whole request, not to its phases. Reward services are not reached through a proxy.
        headers = {"content-type": "application/json"}
        if cfg.api_key_env is not None:
            key = read_service_key(cfg.api_key_env, setting=f"{section}.api_key_env")
            headers["authorization"] = f"Bearer {key}"
        self._client = httpx.AsyncClient(
            timeout=None,
            trust_env=False,
            limits=httpx.Limits(max_connections=None),
            headers=headers,
            event_hooks=BOUNDED,
        )
        self._loop = BackgroundLoop("remote rewards")

    def begin(self) -> "RemoteSession":
        return RemoteSession(self)

    def ask(self, rows: Sequence[FinishedSample], first: int, failed: Counter[str]) -> Future[_Answer]:
        """Send rows to a service, first to number `first`; `failed` counts the failures of each URL.

        Raises DataError if JSON cannot represent the rows.
        """
        try:
            body = json.dumps(encode_request(rows), allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise DataError(
                f"samples {rows[0].label} to {rows[-1].label}: their extra_info cannot be sent to a reward service: "
                f"{error}"
            ) from error
        return self._loop.start(self._ask(body, len(rows), first, failed))

    async def _ask(self, body: bytes, num_rows: int, first: int, failed: Counter[str]) -> _Answer:
        began, failures = awake_s(), list[str]()
        start = first % len(self.urls)
        turns = [*self.urls[start:], *self.urls[:start]]
        for attempt in range(self.cfg.retries + 1):
            if attempt:
                await asyncio.sleep(self.cfg.backoff_s * 2 ** (attempt - 1) * self._jitter.uniform(0.5, 1.5))
            num_refusals = 0
            for url in sorted(turns, key=lambda url: failed[url]):
                try:
                    async with asyncio.timeout(self.cfg.timeout_s):
                        answer = await self._client.post(url, content=body)
                        reply = decode_reply(answer.raise_for_status().json(), num_rows)
                except TimeoutError:
                    reason = f"no answer within {self.cfg.timeout_s} s"
                except httpx.HTTPStatusError as error:
                    reason = f"status {error.response.status_code}"
                    num_refusals += error.response.status_code in _REFUSALS
                except httpx.HTTPError as error:
                    reason = f"{type(error).__name__}: {error}"
                except (BadReplyError, ValueError) as error:
                    reason = str(error)
                else:
                    return _Answer(reply=reply, seconds=awake_s() - began, failures=failures)
                failed[url] += 1
                failures.append(masked_text(f"{url}: {reason}"))
            if num_refusals == len(turns):
                return _Answer(reply=None, seconds=awake_s() - began, failures=failures, is_refused=True)
        return _Answer(reply=None, seconds=awake_s() - began, failures=failures)

    def _without_reward(self) -> Reward:
        """Return what a row gets that was not judged."""
        cfg = self.cfg
        if cfg.on_error == "drop_rows":
            return DROPPED
        assert cfg.value is not None, "the configuration was checked"
        return Reward(score=cfg.value, correct=False)

    def finish(self, sessions: "Sequence[RemoteSession]") -> Judged:
        """Send the rows that fill no request, those of the last session to all services, and wait for all answers.

        Raises RunError if all services refuse a request, which only the configuration can change or, with
        `on_error=raise`, if none answers or a row has no reward.
        """
        cfg = self.cfg
        batch, *others = sessions
        for other in others:
            batch.send(len(batch.waiting))
            batch.requests += other.requests
            batch.waiting = other.waiting
        batch.send(-(-len(batch.waiting) // len(self.urls)))
        rewards: list[Reward] = []
        troubles: list[Trouble] = []
        # Wait for all answers before raising an error, so that no request is still under way.
        answers = [(rows, pending.result()) for rows, pending in batch.requests]
        for rows, answer in answers:
            if (reply := answer.reply) is not None:
                found = [reply.reward(row) for row in range(len(rows))]
                troubles += [
                    Trouble(item=item, outcome="unanswered", reason=str(reply.notes[UNJUDGED][row]))
                    for row, (item, reward) in enumerate(zip(rows, found, strict=True))
                    if reward.dropped
                ]
                if cfg.on_error == "raise" and troubles:
                    raise RunError(
                        f"rewards.remote: a service could not judge sample {troubles[0].item.label}: "
                        f"{troubles[0].reason}; mend the service and --resume, or set rewards.remote.on_error"
                    )
                rewards += [self._without_reward() if reward.dropped else reward for reward in found]
                continue
            troubles += [Trouble(item=item, outcome="unanswered", reason=answer.failures[-1]) for item in rows]
            if answer.is_refused:
                raise RunError(
                    f"rewards.remote: all services refuse the rows of this run, the last: {answer.failures[-1]}; "
                    "correct rewards.remote.urls, or rewards.remote.api_key_env for the key that they expect, and "
                    "--resume"
                )
            if cfg.on_error == "raise":
                raise RunError(
                    f"rewards.remote: no service judged {len(rows)} rows after {len(answer.failures)} attempts, the "
                    f"last: {answer.failures[-1]}; start the services again and --resume, or set "
                    "rewards.remote.on_error"
                )
            rewards += [self._without_reward()] * len(rows)
        name = f"reward/{self.name}"
        logs = sorted({key for reward in rewards for key in reward.details})
        tallies = {
            f"{name}/requests": Tally(total=len(answers)),
            f"{name}/failed_attempts": Tally(total=sum(len(answer.failures) for _, answer in answers)),
            f"{name}/unjudged_rows": Tally(total=len(troubles)),
            f"{name}/unjudged_frac": Tally(total=len(troubles), over=len(rewards)),
            f"perf/reward_{self.name}_latency_s": mean_of(answer.seconds for _, answer in answers),
        }
        for key in logs:
            tallies[f"{name}/{key}"] = mean_of(reward.details[key] for reward in rewards if key in reward.details)
        return Judged(rewards=rewards, tallies=tallies, troubles=troubles)

    def close(self) -> None:
        self._loop.close(self._client.aclose())


@dataclass(slots=True)
class RemoteSession:
    """The requests about one group or batch: a request is sent once it is full, the last ones by `finish`."""

    judge: RemoteJudge
    requests: list[tuple[Sequence[FinishedSample], Future[_Answer]]] = field(default_factory=list)
    waiting: list[FinishedSample] = field(default_factory=list)
    _failed: Counter[str] = field(default_factory=Counter)

    def add(self, item: FinishedSample) -> None:
        self.waiting.append(item)
        if len(self.waiting) == self.judge.cfg.rows_per_request:
            self.send(len(self.waiting))

    def pending(self) -> list[Future[_Answer]]:
        return [pending for _, pending in self.requests]

    def send(self, size: int) -> None:
        """Send the rows that wait, in requests of `size`, to one service after another."""
        for start in range(0, len(self.waiting), max(size, 1)):
            rows = self.waiting[start : start + size]
            self.requests.append((rows, self.judge.ask(rows, len(self.requests), self._failed)))
        self.waiting = []
