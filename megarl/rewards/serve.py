"""Serve the rule's rewards over HTTP in the format of `rewards.wire` (the command `megarl serve-reward`)."""

import asyncio
import contextlib
import hmac
import ipaddress
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from megarl.config.rewards import RewardsConfig
from megarl.errors import ConfigError, DataError, NonFiniteError, RunError
from megarl.host.http_server import BoundedServer, JsonReader, RequestRefusedError, descriptor_limit, trust
from megarl.host.streams import print_lines
from megarl.host.unicode import plain
from megarl.rewards.question import Question, Verdict
from megarl.rewards.rule import RuleJudge
from megarl.rewards.wire import NO_OPINION, UNJUDGED, read_service_key

PATH = "/get_reward"
MAX_REQUEST_BYTES = 256 << 20
# Clients without a key may leave this many requests unfinished. Each needs two descriptors once its body lies on disk.
MAX_STRANGERS = 1024
KEEP_ALIVE_S = 10
# Time that a stop waits for answers in progress.
STOP_S = 30
_LOGGED_OUTCOMES = ("timed_out", "parse_failed", "crashed")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The address where a reward service listens (port 0: any free port), and how many rows it judges at a time.

    api_key_env: the environment variable with the key that clients must send; None: none is asked for.
    data_source: the data source of requests that do not name one.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key_env: str | None = None
    max_rows: int = 4096
    data_source: str | None = None


class BadRequestError(Exception):
    """The error of a malformed request; its message says where."""


class RewardService:
    """A service that answers requests for rewards; only one event loop may use it."""

    def __init__(self, judge: RuleJudge, options: ServeOptions, *, key: str | None = None) -> None:
        self._judge, self._options, self._key = judge, options, key
        self._bodies = JsonReader(MAX_REQUEST_BYTES)
        self._num_in_work, self._num_judged = 0, 0

    def app(self) -> Starlette:
        """Build the ASGI application with its two routes: POST `PATH` and GET /health."""
        return Starlette(
            routes=[Route(PATH, self._answer, methods=["POST"]), Route("/health", self._health, methods=["GET"])]
        )

    async def _health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok", "rows_in_work": self._num_in_work, "rows_judged": self._num_judged})

    async def _answer(self, request: Request) -> Response:
        if self._key is not None:
            scheme, _, sent = request.headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(sent.encode(), self._key.encode()):
                refusal = {"error": "the header authorization has no valid key; send: Bearer KEY"}
                return JSONResponse(refusal, status_code=401, headers={"www-authenticate": "Bearer"})
            trust(request)
        try:
            body = await self._bodies.read(request)
            questions = decode_request(body, self._options.data_source)
            # A request over the bound is accepted when no other one is in progress.
            if self._num_in_work and self._num_in_work + len(questions) > self._options.max_rows:
                refusal = {"error": f"{self._num_in_work} rows are in work; try again"}
                return JSONResponse(refusal, status_code=503, headers={"retry-after": "1"})
            self._num_in_work += len(questions)
            try:
                judging = self._judge.begin()
                for row, question in enumerate(questions):
                    judging.ask(question, label=f"row {row}")
                await asyncio.gather(*map(asyncio.wrap_future, judging.pending()), return_exceptions=True)
                verdicts = await asyncio.to_thread(self._judge.verdicts, [judging])
            finally:
                self._num_in_work -= len(questions)
            self._num_judged += len(questions)
            return JSONResponse(plain(encode_reply(verdicts)))
        except RequestRefusedError as error:
            return JSONResponse({"error": str(error)}, status_code=error.status)
        except RecursionError:
            return JSONResponse({"error": "the body is nested too deep; flatten it"}, status_code=400)
        except (BadRequestError, ConfigError, DataError) as error:
            return JSONResponse({"error": str(error)}, status_code=422)
        except (RunError, NonFiniteError) as error:
            return JSONResponse({"error": str(error)}, status_code=500)


def encode_reply(verdicts: Sequence[Verdict]) -> dict[str, object]:
    """Build the reply: rewards, correctness as `scores`, other numbers as `extra_logs`.

    A row that nobody could judge has null as its reward and score, and the reason in `extra_logs.unjudged`. Names of
    numbers on which nobody has an opinion in any row are in `no_opinion`.
    """
    rewards = [verdict.reward for verdict in verdicts]
    judged = [reward for reward in rewards if reward is not None]
    # Details that some judged rows lack cannot be sent: null is not an opinion.
    known = [{*reward.details, *reward.no_opinion} for reward in judged]
    shared = set.intersection(*known) if known else set()
    logged = shared & {name for reward in judged for name in reward.details}
    reasons = [f"{each.outcome}: {each.reason}" if each.reward is None else "" for each in verdicts]
    return {
        "rewards": [None if reward is None else reward.score for reward in rewards],
        "scores": [None if reward is None else float(reward.correct) for reward in rewards],
        "extra_logs": {
            **({UNJUDGED: reasons} if any(reasons) else {}),
            **{name: [reward and reward.details.get(name) for reward in rewards] for name in sorted(logged)},
            **{name: [float(each.outcome == name) for each in verdicts] for name in _LOGGED_OUTCOMES},
        },
        # Not as columns of nulls, which other trainers could not average.
        **({NO_OPINION: sorted(shared - logged)} if shared - logged else {}),
    }


def decode_request(body: object, data_source: str | None) -> list[Question]:
    """Parse a request into questions; its queries are prompt + response. Raise BadRequestError if it is malformed."""
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
    questions = []
    rows = zip(texts["query"], texts["prompts"], texts["labels"], sources, extras, strict=True)
    for row, (query, prompt, label, source, extra) in enumerate(rows):
        if not query.startswith(prompt):
            raise BadRequestError(f"query[{row}]: does not start with prompts[{row}]")
        if source is None:
            raise BadRequestError("data_source: is missing; send it, or start the service with --data-source")
        response = query.removeprefix(prompt)
        questions.append(
            Question(
                data_source=source, prompt=prompt, response=response, ground_truth=label, extra_info=extra, group=prompt
            )
        )
    return questions


def _texts(body: Mapping[str, object], name: str) -> list[str]:
    column = body.get(name)
    if not isinstance(column, list) or not all(isinstance(text, str) for text in column):
        raise BadRequestError(f"{name}: expected a list of strings")
    return column


class _Server(BoundedServer):
    """A server that exits successfully on SIGTERM and SIGINT, after its answers in progress; uvicorn would die of the
    signal.
    """

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, setattr, self, "should_exit", True)
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        where = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        print_lines(f"rewards at {where}{PATH}, health at {where}/health")


def serve_rewards(rewards: RewardsConfig, options: ServeOptions) -> None:
    """Serve rewards until a signal stops the service. RunError if it cannot listen on the address, ConfigError if other
    machines would reach it without a key.
    """
    variable = options.api_key_env
    key = None if variable is None else read_service_key(variable, setting="--api-key-env")
    with _listen(options) as listener, contextlib.closing(RuleJudge(rewards)) as judge:
        server = _Server(
            RewardService(judge, options, key=key).app(),
            "reward_service",
            max_strangers=min(MAX_STRANGERS, descriptor_limit() // 4),
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=STOP_S,
        )
        asyncio.run(server.serve(sockets=[listener]))


def _listen(options: ServeOptions) -> socket.socket:
    """Return a socket on the address of the options; errors are those of `serve_rewards`."""
    try:
        # Without a host, any address counts.
        found = socket.getaddrinfo(options.host or None, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        if options.api_key_env is None and not ipaddress.ip_address(address[0]).is_loopback:
            raise ConfigError(
                f"--host: got {options.host!r}, where other machines reach the service, expected a key for that; put "
                "one into an environment variable, name it with --api-key-env, and in rewards.remote.api_key_env of "
                "the runs, or listen on 127.0.0.1"
            )
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        raise RunError(
            f"--host, --port: cannot listen on {options.host}:{options.port}; choose a free port, or 0 for any"
        ) from error
