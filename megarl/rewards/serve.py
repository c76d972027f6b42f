"""`megarl serve-reward`: the rule as a service, in the format of `rewards.wire`."""

import asyncio
import contextlib
import json
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from socket import socket
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from megarl.config.rewards import RewardsConfig
from megarl.errors import ConfigError, DataError, NonFiniteError, RunError
from megarl.rewards.rule import Question, RuleJudge, outcome_of
from megarl.rewards.verifier import Verdict
from megarl.types import Reward

PATH = "/get_reward"
MAX_REQUEST_BYTES = 256 << 20
# How long a stop waits for answers under way.
STOP_S = 30
_LOGGED_OUTCOMES = ("timed_out", "parse_failed", "crashed")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Where a service listens (port 0: any free one), and how many rows it has in work at most.

    data_source: of requests that name none.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    max_rows: int = 4096
    data_source: str | None = None


class BadRequestError(Exception):
    """A request is not in the format; the message says where."""


class RewardService:
    """Answers requests. One event loop may use it."""

    def __init__(self, judge: RuleJudge, options: ServeOptions) -> None:
        self._judge, self._options = judge, options
        self._num_in_work, self._num_judged = 0, 0

    def app(self) -> Starlette:
        """The routes: POST `PATH`, GET /health."""
        return Starlette(
            routes=[
                Route(PATH, self._answer, methods=["POST"]),
                Route("/health", self._health, methods=["GET"]),
            ]
        )

    async def _health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok", "rows_in_work": self._num_in_work, "rows_judged": self._num_judged})

    async def _answer(self, request: Request) -> Response:
        try:
            questions = decode_request(await _read(request), self._options.data_source)
            # A request that is larger than the bound is taken when nothing else is in work.
            if self._num_in_work and self._num_in_work + len(questions) > self._options.max_rows:
                return _refusal(503, f"{self._num_in_work} rows are in work; try again", retry_s=1)
            return JSONResponse(await self._judged(questions))
        except (BadRequestError, ConfigError, DataError) as error:
            return _refusal(422, str(error))
        except (RunError, NonFiniteError) as error:
            return _refusal(500, str(error))

    async def _judged(self, questions: Sequence[Question]) -> dict[str, Any]:
        self._num_in_work += len(questions)
        try:
            pending = [asyncio.wrap_future(self._judge.submit(question)) for question in questions]
            verdicts = await asyncio.gather(*pending)
        finally:
            self._num_in_work -= len(questions)
        self._num_judged += len(questions)
        rewards = [self._judge.rules.reward(q.data_source, v) for q, v in zip(questions, verdicts, strict=True)]
        return encode_reply(rewards, verdicts)


def encode_reply(rewards: Sequence[Reward], verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Rewards, correctness as `scores`, and outcomes and details as `extra_logs`; RunError for a dropped row."""
    for row, (reward, verdict) in enumerate(zip(rewards, verdicts, strict=True)):
        if reward.dropped:
            raise RunError(f"row {row}: the reward function has no answer: {verdict.outcome}, {verdict.reason}")
    outcomes = [outcome_of(verdict) for verdict in verdicts]
    # Details that some rows lack have no place in lists of one entry per row.
    shared = set.intersection(*(set(reward.details) for reward in rewards)) if rewards else set()
    return {
        "rewards": [reward.score for reward in rewards],
        "scores": [float(reward.correct) for reward in rewards],
        "extra_logs": {
            **{name: [reward.details[name] for reward in rewards] for name in sorted(shared)},
            **{name: [float(outcome == name) for outcome in outcomes] for name in _LOGGED_OUTCOMES},
        },
    }


def decode_request(body: Any, data_source: str | None) -> list[Question]:
    """What a request asks; BadRequestError if it is none. Responses are what follows the prompts in the queries."""
    if not isinstance(body, Mapping):
        raise BadRequestError("got no object, expected query, prompts and labels")
    texts = {name: _texts(body, name) for name in ("query", "prompts", "labels")}
    num_rows = len(texts["query"])
    sources = _texts(body, "data_source") if body.get("data_source") is not None else [data_source] * num_rows
    extras = body.get("extra_info") or [{}] * num_rows
    if not isinstance(extras, list) or not all(isinstance(extra, Mapping) for extra in extras):
        raise BadRequestError("extra_info: expected a list of objects")
    for name, column in {**texts, "data_source": sources, "extra_info": extras}.items():
        if len(column) != num_rows:
            raise BadRequestError(f"{name}: got {len(column)} rows, expected {num_rows}, those of query")
    rows = zip(texts["query"], texts["prompts"], texts["labels"], sources, extras, strict=True)
    return [_question(i, *row) for i, row in enumerate(rows)]


def _texts(body: Mapping[str, Any], name: str) -> list[str]:
    column = body.get(name)
    if not isinstance(column, list) or not all(isinstance(text, str) for text in column):
        raise BadRequestError(f"{name}: expected a list of strings")
    return column


def _question(row: int, query: str, prompt: str, label: str, source: str | None, extra: Mapping[str, Any]) -> Question:
    if not query.startswith(prompt):
        raise BadRequestError(f"query[{row}]: does not start with prompts[{row}]")
    if source is None:
        raise BadRequestError("data_source: is missing; send it, or start the service with --data-source")
    return Question(
        data_source=source, prompt=prompt, response=query.removeprefix(prompt), ground_truth=label, extra_info=extra
    )


async def _read(request: Request) -> Any:
    content = bytearray()
    async for part in request.stream():
        content += part
        if len(content) > MAX_REQUEST_BYTES:
            raise BadRequestError(f"got more than {MAX_REQUEST_BYTES} bytes; send fewer rows at a time")
    try:
        return json.loads(content)
    except ValueError as error:
        raise BadRequestError(f"got no JSON: {error}") from error


def _refusal(status: int, reason: str, *, retry_s: int | None = None) -> Response:
    headers = {} if retry_s is None else {"retry-after": str(retry_s)}
    return JSONResponse({"error": reason}, status_code=status, headers=headers)


class _Server(uvicorn.Server):
    """Ends on SIGTERM and SIGINT when answers under way are sent, as success; uvicorn would die of the signal."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        yield

    def _stop(self) -> None:
        self.should_exit = True

    async def startup(self, sockets: list[socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            print(f"rewards at http://{host}:{port}{PATH}, health at http://{host}:{port}/health", flush=True)


def serve_rewards(rewards: RewardsConfig, options: ServeOptions) -> None:
    """Serve until a signal says stop. RunError if the address cannot be had."""
    with contextlib.closing(RuleJudge(rewards)) as judge:
        config = uvicorn.Config(
            RewardService(judge, options).app(),
            host=options.host,
            port=options.port,
            log_level="warning",
            timeout_graceful_shutdown=STOP_S,
            lifespan="off",
        )
        server = _Server(config)
        try:
            asyncio.run(server.serve())
        except SystemExit as left:  # uvicorn's way to say that it cannot listen
            raise RunError(
                f"--host, --port: cannot listen on {options.host}:{options.port}; choose a free port, or 0 for any"
            ) from left
