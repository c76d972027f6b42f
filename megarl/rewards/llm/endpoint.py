"""Ask language models behind OpenAI-compatible HTTP endpoints, and keep in an SQLite file what they answered, so that a
question is paid for once.
"""

import asyncio
import hashlib
import json
import os
import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import urlsplit

from megarl.config.judges import JudgeConfig
from megarl.errors import ConfigError, LargeReplyError, RunError
from megarl.host.child_environment import proxy_of
from megarl.host.clock import awake_s
from megarl.host.http_replies import BOUNDED
from megarl.host.masking import masked_text
from megarl.host.unicode import readable
from megarl.host.writing import dispensable
from megarl.rewards.background import BackgroundLoop
from megarl.types import FinishReason, Message

if TYPE_CHECKING:
    from openai import AsyncOpenAI


# How servers name the end of an answer that the model ended itself; None: they do not tell.
_WHOLE = frozenset({None, "stop", "eos", "eos_token", "end_turn", "stop_sequence"})


def is_whole(finish_reason: str | None) -> bool:
    """Return whether a model's answer is whole: not cut at a limit, withheld by a filter, or given up.

    >>> [is_whole(reason) for reason in ("stop", "length", "content_filter", None)]
    [True, False, False, True]
    """
    return (finish_reason.casefold() if finish_reason else None) in _WHOLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A chat that a model continues. Requests with the same chat and another seed are samples of their own."""

    messages: tuple[Message, ...]
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeCompletion:
    """The reply of a model; `text` is None if it could not be asked, and then `reason` says why in one line.

    finish_reason: how the text ended; one that is not whole states no verdict. tokens: read and written. is_refused:
    every endpoint refused the request because of its settings.
    """

    text: str | None
    reason: str = ""
    finish_reason: str | None = FinishReason.STOP
    tokens: int = 0
    seconds: float = 0.0
    is_cached: bool = False
    is_refused: bool = False

    @property
    def unread(self) -> str:
        """Return why the text must not be read as a verdict, empty if it may be."""
        if is_whole(self.finish_reason):
            return ""
        remedy = "; raise sampling.max_tokens" if self.finish_reason == FinishReason.LENGTH else ""
        return f"the judge's answer was cut (finish_reason {self.finish_reason}){remedy}"


class Completions(Protocol):
    """A language model that continues chats.

    is_deferred: whether requests wait for `flush`, because the model shares its devices with others.
    """

    is_deferred: bool

    def submit(self, request: Request) -> Future[JudgeCompletion]:
        """Ask, and return a future of the answer, without waiting. The future may raise RunError."""

    def flush(self) -> None:
        """Start, and wait for, all requests that `submit` has put off."""

    def close(self) -> None:
        """End all processes and connections that were opened for the model."""


class AnswerCache:
    """Answers by their requests; several processes may share the file, but one thread this object."""

    def __init__(self, path: Path) -> None:
        """Open or create the file; raise ConfigError if that is impossible."""
        self._what = f"the cache {path}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path, timeout=60.0, isolation_level=None, check_same_thread=False)
            self._db.execute("CREATE TABLE IF NOT EXISTS answers (request TEXT PRIMARY KEY, answer TEXT NOT NULL)")
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"rewards.judges: cannot open the cache {path}: {error}; choose another file") from error

    @staticmethod
    def key(body: object) -> str:
        """Return the key of a request, a hash of its whole body."""
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()

    def get(self, key: str) -> str | None:
        """Return the answer to a request, None if there is none or it cannot be read."""
        with dispensable(self._what, sqlite3.Error, done="used"):
            row = self._db.execute("SELECT answer FROM answers WHERE request = ?", (key,)).fetchone()
            return None if row is None else str(row[0])
        return None

    def put(self, key: str, answer: str) -> None:
        """Keep an answer, if the storage takes it; the first one stays."""
        with dispensable(self._what, sqlite3.Error, done="used"):
            self._db.execute("INSERT OR IGNORE INTO answers VALUES (?, ?)", (key, answer))

    def close(self) -> None:
        """Close the file."""
        self._db.close()


T = TypeVar("T")

# Statuses of a wrong URL, model or key, which no retry and no other row changes.
_REFUSALS = (401, 403, 404, 405)
# A retry may wait this long besides its own time limit.
_LONGEST_BACKOFF_S = 60.0


class EndpointCompletions:
    """A model behind equivalent OpenAI-compatible endpoints, with a cache and a budget.

    Requests take turns among the endpoints; those that failed least come first. The OpenAI client retries what may
    pass, and waits as long as the endpoint says.
    """

    is_deferred = False

    def __init__(self, cfg: JudgeConfig, *, name: str, urls: tuple[str, ...] = (), api_key: str | None = None) -> None:
        """Open the clients without asking anything; `urls` and `api_key` replace those of the configuration."""
        # The package takes more than a second to import.
        import httpx2
        import openai

        key, endpoint = f"rewards.judges.{name}", cfg.endpoint
        if api_key is None:
            api_key = "none" if endpoint.api_key_env is None else os.environ.get(endpoint.api_key_env, "")
        if not api_key:
            raise ConfigError(f"{key}.endpoint.api_key_env: {endpoint.api_key_env} is not set; export the key")
        self._cfg, self._key, self._model = cfg, key, endpoint.model
        # Servers of the run's own are asked directly.
        others = endpoint.urls if endpoint.use_proxy and not urls else ()
        behind = [url for url in others if proxy_of(url, f"{key}.endpoint.urls")]
        direct = httpx2.AsyncHTTPTransport(limits=openai.DEFAULT_CONNECTION_LIMITS)
        self._http = openai.DefaultAsyncHttpxClient(
            transport=None if behind else direct,
            mounts={f"all://{urlsplit(url).netloc}": direct for url in endpoint.urls if url not in behind},
            event_hooks=BOUNDED,
        )
        self._clients: dict[str, AsyncOpenAI] = {
            url: openai.AsyncOpenAI(
                base_url=url,
                api_key=api_key,
                timeout=endpoint.timeout_s,
                max_retries=endpoint.retries,
                http_client=self._http,
            )
            for url in (urls or endpoint.urls)
        }
        self._cache = None if cfg.cache is None else AnswerCache(Path(cfg.cache))
        self._failures: Counter[str] = Counter()
        self._num_started = self._num_requests = self._num_tokens = 0
        self._slots = asyncio.Semaphore(endpoint.concurrency)
        self._naming = asyncio.Lock()
        self._loop = BackgroundLoop(name)

    def submit(self, request: Request) -> Future[JudgeCompletion]:
        return self._loop.start(self._complete(request))

    def flush(self) -> None:
        """Do nothing: requests start at once."""

    def close(self) -> None:
        self._loop.close(self._http.aclose())
        if self._cache is not None:
            self._cache.close()

    async def _complete(self, request: Request) -> JudgeCompletion:
        sampling = self._cfg.sampling
        async with self._slots:
            began = awake_s()
            try:
                model = await self._model_name()
            except _UnansweredError as error:
                return JudgeCompletion(text=None, reason=str(error), is_refused=error.is_refused)
            body: dict[str, Any] = {
                "model": model,
                "messages": [message.as_dict() for message in request.messages],
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "max_tokens": sampling.max_tokens,
                "seed": request.seed,
                "extra_body": dict(sampling.extra_body),
            }
            key = "" if self._cache is None else self._cache.key(body)
            if self._cache is not None and (known := self._cache.get(key)) is not None:
                return JudgeCompletion(text=known, is_cached=True)
            self._spend()
            try:
                reply = await self._first_answer(lambda client: client.chat.completions.create(**body))
            except _UnansweredError as error:
                return JudgeCompletion(
                    text=None, reason=str(error), is_refused=error.is_refused, seconds=awake_s() - began
                )
            tokens = reply.usage.total_tokens if reply.usage is not None else 0
            self._num_tokens += tokens
            choice = reply.choices[0] if reply.choices else None
            completion = JudgeCompletion(
                text=readable((choice and choice.message.content) or ""),
                finish_reason=choice.finish_reason if choice else FinishReason.ABORT,
                tokens=tokens,
                seconds=awake_s() - began,
            )
            if self._cache is not None and not completion.unread:
                self._cache.put(key, completion.text or "")
            return completion

    def _spend(self) -> None:
        """Count a request; raise RunError if the budget has none left."""
        budget = self._cfg.budget
        for name, spent, limit in (
            ("requests", self._num_requests, budget.requests),
            ("tokens", self._num_tokens, budget.tokens),
        ):
            if limit is not None and spent >= limit:
                raise RunError(
                    f"{self._key}.budget.{name}: {spent} are spent, of {limit}; raise the budget and --resume"
                )
        self._num_requests += 1

    async def _model_name(self) -> str:
        """Return the model's name; the endpoint is asked for it once."""
        async with self._naming:
            if self._model is not None:
                return self._model
            listed = await self._first_answer(lambda client: client.models.list())
            if not listed.data:
                raise _UnansweredError("the endpoint lists no models", is_refused=True)
            self._model = str(listed.data[0].id)
            return self._model

    async def _first_answer(self, ask: Callable[["AsyncOpenAI"], Awaitable[T]]) -> T:
        """Return what the first endpoint answers that answers at all; `ask` calls a client."""
        import openai

        endpoint, self._num_started = self._cfg.endpoint, self._num_started + 1
        deadline_s = endpoint.timeout_s * (endpoint.retries + 1) + _LONGEST_BACKOFF_S * endpoint.retries
        urls = list(self._clients)
        start = self._num_started % len(urls)
        reason, num_refusals = "", 0
        for url in sorted([*urls[start:], *urls[:start]], key=lambda url: self._failures[url]):
            try:
                async with asyncio.timeout(deadline_s):
                    answer = await ask(self._clients[url])
            except openai.APIStatusError as error:
                reason = f"{url}: status {error.status_code}: {error.message[:200]}"
                num_refusals += error.status_code in _REFUSALS
                # A request that the model cannot take is not the endpoint's fault.
                self._failures[url] += error.status_code not in (400, 413, 422)
            except (openai.OpenAIError, TimeoutError, ValueError) as error:
                # The client tells this one as an error of the connection.
                cause = error.__cause__ if isinstance(error.__cause__, LargeReplyError) else error
                reason = f"{url}: {type(cause).__name__}: {str(cause)[:200]}"
                self._failures[url] += 1
            else:
                self._failures[url] = 0
                return answer
        raise _UnansweredError(masked_text(reason), is_refused=num_refusals == len(urls))


class _UnansweredError(Exception):
    """The error of a request that no endpoint answered."""

    def __init__(self, reason: str, *, is_refused: bool) -> None:
        super().__init__(reason)
        self.is_refused = is_refused
