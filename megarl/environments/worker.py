"""Run the environments of thousands of conversations in one asyncio loop, and turn their replies into tokens."""

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from megarl.config.environments import EnvironmentConfig
from megarl.data.answers import response_decoder
from megarl.data.chat import load_tokenizer
from megarl.data.turns import InterTurnTokens
from megarl.environments.base import Action, Environment, Reply, open_environments, short
from megarl.environments.calls import THREADS, LateError, attempt, causes_of, describe, is_exhaustion, late_calls
from megarl.host.clock import awake_s
from megarl.host.streams import print_lines
from megarl.host.unicode import readable
from megarl.host.user_code import place_of
from megarl.types import ChatPart, Message, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_DETAILS_CHARS, MOST_REASON_CHARS = 100_000, 2000
# The number of calls that never returned with which a worker is replaced: each keeps a thread, and often a connection.
MOST_LATE_CALLS = 500
# This many failures in a row with which it is replaced if it has no files or memory left, whichever conversation asks.
MOST_EXHAUSTED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """The settings with which an environment worker starts; `names` are the environments that rows use.

    max_prompt_tokens: a conversation that an environment opens with more tokens fails; None: there is no limit.
    marks_texts: whether replies say which tokens are the environment's own text.
    """

    model_path: str
    chat_template: Mapping[str, object]
    names: tuple[str, ...]
    config: EnvironmentConfig
    max_prompt_tokens: int | None = None
    marks_texts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRequest:
    """A request to begin a conversation, or to go on with one whose policy wrote `turns` so far, as token ids.

    chat: the parts of the conversation that replies brought, where its history is rendered.
    """

    prompt: Prompt
    turns: tuple[Sequence[int], ...] = ()
    chat: tuple[ChatPart, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """A request to reply to a turn of the policy.

    is_cut: a limit ended the turn. num_before: the tokens of prompt and conversation before it.
    """

    token_ids: Sequence[int]
    turn: int
    is_cut: bool = False
    num_before: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TriesRequest:
    """A request to choose among several tries of a turn."""

    tries: tuple[TurnRequest, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeReply:
    """The result of a request to a worker.

    token_ids: after a turn, what follows it up to the policy's next turn; after a start, the whole prompt if the
    environment added messages to it, else nothing. after_turn: the number of the turn that they follow; None: the last.
    is_context: they are instead all that the policy reads next. observed: bounds, in `token_ids`, of the texts of its
    messages; None: nobody asked. max_turn_tokens: the environment's limit of the next turn. num_tries: how many times
    the policy writes it. trains: whether it trains. rewards: those of turns by their numbers, besides `reward` of the
    last one. is_anew: a conversation that was to go on begins again. part: what was said, where the history is
    rendered, so that the conversation can go on elsewhere. failure: the kind of failure (`raised`, `timed_out`,
    `died`), in which case the rest says nothing; reason: one line. worn_out: why the worker is to be replaced; empty:
    it is not.
    """

    token_ids: tuple[int, ...] = ()
    max_turn_tokens: int | None = None
    num_tries: int = 1
    trains: bool = True
    done: bool = False
    reward: float = 0.0
    rewards: Mapping[int, float] = field(default_factory=dict)
    num_calls: int = 0
    details: Mapping[str, object] = field(default_factory=dict)
    is_anew: bool = False
    part: ChatPart | None = None
    after_turn: int | None = None
    is_context: bool = False
    observed: tuple[tuple[int, int], ...] | None = None
    seconds: float = 0.0
    failure: str = ""
    reason: str = ""
    worn_out: str = ""


@dataclass(slots=True, kw_only=True)
class _Conversation:
    """A conversation that has begun. chat: the messages that the policy reads for its next turn. turns: each
    turn's last token, and the messages up to and with it, by its number. part: what the environment said last.
    """

    environment: Environment
    began: float
    chat: Sequence[Message]
    turns: dict[int, tuple[int, Sequence[Message]]] = field(default_factory=dict)
    part: ChatPart | None = None

    def hear(self, messages: Sequence[Message], after: int | None) -> None:
        """Let the policy read messages next, after the turn of a number, or as the whole chat."""
        self.chat = [*([] if after is None else self.turns[after][1]), *messages]
        self.part = ChatPart(turn=len(self.turns), messages=tuple(messages), after=after)

    def recall(self, last_tokens: Sequence[int], texts: Sequence[str], parts: Sequence[ChatPart]) -> None:
        """Let a conversation go on that has these turns of the policy, and heard these parts.

        Without parts the chat lacks replies, and must not be rendered.
        """
        heard = {part.turn: part for part in parts}
        for turn, (last_token, text) in enumerate(zip(last_tokens, texts, strict=True)):
            if (part := heard.get(turn)) is not None:
                self.hear(part.messages, part.after)
            self.turns[turn] = last_token, [*self.chat, Message(role="assistant", content=text)]
        if (part := heard.get(len(self.turns))) is not None:
            self.hear(part.messages, part.after)


class EnvironmentWorker:
    """An environment worker; it is used from one event loop. Every request has one reply, whatever the environment
    raises, returns or never ends, except that code which blocks the loop delays all others.
    """

    def __init__(self, spec: WorkerSpec, tokenizer: "PreTrainedTokenizerBase | None" = None) -> None:
        self._spec, self._config = spec, spec.config
        self._makers = open_environments(spec.config, spec.names)
        tokenizer = tokenizer or load_tokenizer(spec.model_path, arguments=spec.chat_template)
        self._inter_turn, self._decode = InterTurnTokens(tokenizer), response_decoder(tokenizer)
        self._live: dict[int, _Conversation] = {}
        self._num_exhausted = 0

    async def start(self, key: int, request: StartRequest) -> EpisodeReply:
        """Begin a conversation under a key of the caller's."""
        began = awake_s()

        async def begin() -> EpisodeReply:
            # For what users hand to asyncio.to_thread, which may never return.
            asyncio.get_running_loop().set_default_executor(THREADS)
            environment = self._makers[request.prompt.environment]()
            environment.count_tokens = self._count_tokens
            live = _Conversation(environment=environment, began=began, chat=request.prompt.messages)
            self._live[key] = live
            # Without its messages, as checkpoints of earlier versions have it, a conversation is not rendered again.
            if request.turns and (request.chat or self._config.history == "written"):
                actions = [Action(text=self._decode(ids), turn=i) for i, ids in enumerate(request.turns)]
                if await environment.resume(request.prompt, actions):
                    live.recall([ids[-1] for ids in request.turns], [each.text for each in actions], request.chat)
                    return EpisodeReply(**self._next_turn(environment))
            opening = [self._inter_turn.plain(each) for each in short(await environment.start(request.prompt))]
            if opening:
                live.hear(opening if environment.owns_prompt else [*live.chat, *opening], None)
            ids = self._inter_turn.opening(live.chat, environment.tools) if opening else []
            if (limit := self._spec.max_prompt_tokens) is not None and len(ids) > limit:
                raise ValueError(f"the opening makes a prompt of {len(ids)} tokens, data.max_prompt_tokens is {limit}")
            part = live.part if self._config.history == "rendered" else None
            told = self._next_turn(environment)
            return EpisodeReply(token_ids=tuple(ids), is_anew=bool(request.turns), part=part, **told)

        return await self._limited(begin)

    async def act(self, key: int, request: TurnRequest | TriesRequest) -> EpisodeReply:
        """Pass a turn of the policy, or all tries of a turn, to its environment, and return the reply."""
        live = self._live[key]
        environment = live.environment
        tries = request.tries if isinstance(request, TriesRequest) else (request,)

        async def reply() -> EpisodeReply:
            actions = []
            for each in tries:
                action = Action(
                    text=self._decode(list(each.token_ids)),
                    turn=each.turn,
                    is_cut=each.is_cut,
                    num_tokens=len(each.token_ids),
                    num_before=each.num_before,
                )
                turn = Message(role="assistant", content=action.text)
                live.turns[action.turn] = each.token_ids[-1], [*live.chat, turn]
                actions.append(action)
            said = await (environment.reply(actions[0]) if len(actions) == 1 else environment.choose(actions))
            rewards = _rewards(live, actions, said)
            follows = EpisodeReply() if said.done else self._following(live, actions, said)
            if self._config.history == "rendered" and not said.done:
                follows = replace(follows, part=live.part)
            return replace(
                follows,
                done=bool(said.done),
                reward=rewards.pop(actions[-1].turn, 0.0),
                rewards=rewards,
                num_calls=int(said.num_calls),
                details=said.details,
                **self._next_turn(environment),
            )

        return await self._limited(reply, left_s=self._config.episode_timeout_s - (awake_s() - live.began))

    def _next_turn(self, environment: Environment) -> dict[str, Any]:
        """Return what an environment says of the policy's next turn, as fields of a reply."""
        limit, most = environment.max_turn_tokens, self._config.max_turns
        if not 1 <= environment.num_tries <= most:
            raise ValueError(f"num_tries is {environment.num_tries}, expected 1 to environment.max_turns={most}")
        return {
            "max_turn_tokens": None if limit is None else int(limit),
            "num_tries": int(environment.num_tries),
            "trains": bool(environment.trains),
        }

    def _count_tokens(self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]]) -> int:
        return len(self._inter_turn.opening([self._inter_turn.plain(each) for each in messages], tools))

    def _following(self, live: _Conversation, actions: Sequence[Action], said: Reply) -> EpisodeReply:
        """Return the tokens that the policy reads after a turn or its tries, and where they stand."""
        if not said.messages and not said.context:
            raise ValueError("the reply has no messages, and does not end the conversation; set done=True")
        role, inter_turn, tools = self._config.tool_role, self._inter_turn, live.environment.tools
        messages = [replace(m, role=role) if m.role == "tool" else m for m in short(said.context or said.messages)]
        # The policy's own turns spell no special token.
        plain = [each if each.role == "assistant" else inter_turn.plain(each) for each in messages]
        after = said.after_turn
        if after is None and len(actions) == 1 and not said.context:
            after = actions[0].turn
        if after not in live.turns and not (said.context and after is None):
            raise ValueError(f"after_turn is {after}, expected a turn so far: {sorted(live.turns)}")
        if said.context:
            live.hear(plain, None)
            # Nothing in it is an observation, as it repeats what was said before.
            texts = () if self._spec.marks_texts else None
            ids = inter_turn.opening(plain, tools)
            return EpisodeReply(token_ids=tuple(ids), observed=texts, is_context=True, after_turn=after)
        assert after is not None, "messages follow a turn"
        last_token, chat = live.turns[after]
        live.hear(plain, after)
        ids, render, num_repeated = inter_turn.between(messages, last_token=last_token), inter_turn.follows, 0
        if self._config.history == "rendered":
            written, whole = inter_turn.text(chat[:-1], tools) + chat[-1].content, partial(inter_turn.text, tools=tools)
            if not whole(live.chat).startswith(written):
                ids, render, num_repeated = inter_turn.opening(live.chat, tools), whole, len(chat)
        observed = None
        if self._spec.marks_texts:
            own = [num_repeated + i for i, m in enumerate(messages) if m.role != "assistant" and i not in said.warnings]
            observed = tuple(inter_turn.own_texts(ids, live.chat[len(chat) - num_repeated :], own, render))
        return EpisodeReply(token_ids=tuple(ids), observed=observed, is_context=num_repeated > 0, after_turn=after)

    async def close(self, key: int) -> None:
        """End a conversation; nothing that its environment does counts any more."""
        if (found := self._live.pop(key, None)) is not None:
            try:
                await attempt(found.environment.close, self._config.reply_timeout_s)
            except Exception as error:
                print_lines(f"an environment failed to close: {describe(error)}")

    async def _limited(self, call: Callable[[], Awaitable[EpisodeReply]], *, left_s: float = 1e9) -> EpisodeReply:
        """Await a call within the time limits; an exception or a late answer becomes a failure."""
        began, limit_s = awake_s(), min(self._config.reply_timeout_s, max(0.0, left_s))
        is_exhausted = False
        try:
            reply = await attempt(call, limit_s)
        except LateError:
            which = "reply" if limit_s == self._config.reply_timeout_s else "episode"
            reply = EpisodeReply(failure="timed_out", reason=f"no reply within environment.{which}_timeout_s")
        except Exception as error:
            reply, is_exhausted = _raised(error), is_exhaustion(error)
        self._num_exhausted = self._num_exhausted + 1 if is_exhausted else self._num_exhausted * bool(reply.failure)
        worn_out = ""
        if self._num_exhausted >= MOST_EXHAUSTED:
            worn_out = (
                f"all of its last {self._num_exhausted} requests failed, the latest with {reply.reason}; close what "
                "environments open, or raise `ulimit -n` or the memory"
            )
        if (late := late_calls()).total() >= MOST_LATE_CALLS:
            names = ", ".join(f"{name} {count} times" for name, count in late.most_common(3))
            worn_out = f"{late.total()} calls never returned: {names}; give what they wait for a time limit of its own"
        return replace(reply, seconds=awake_s() - began, worn_out=worn_out)


def sendable(reply: EpisodeReply) -> EpisodeReply:
    """Return the reply with details that any process can read: numbers, texts, and lists and mappings of them.

    Other values are written as text. Details that cannot be, or are megabytes, make the reply a failure.
    """
    try:
        text = readable(json.dumps(dict(reply.details), default=_plain_value, ensure_ascii=False))
        if len(text) > MOST_DETAILS_CHARS:
            raise ValueError(f"details of {len(text)} characters, expected at most {MOST_DETAILS_CHARS}; shorten them")
        # No whole number that float() refuses.
        details = json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < 16 else float(digits))
    except BaseException as error:
        return replace(_raised(error), seconds=reply.seconds, worn_out=reply.worn_out)
    return replace(reply, details=details)


def _plain_value(value: Any) -> object:
    with suppress(AttributeError, TypeError, ValueError, RuntimeError):
        # A number of NumPy's or torch's.
        return value.item()
    return str(value)


def _raised(error: BaseException) -> EpisodeReply:
    """Return the failure of what raised an error: what, the error behind it, and the line of the user's file."""
    chain = causes_of(error)
    said = dict.fromkeys(readable(describe(each)[:MOST_REASON_CHARS]).splitlines()[0] for each in (error, chain[-1]))
    place = next(filter(None, map(place_of, chain)), "")
    return EpisodeReply(failure="raised", reason=", from ".join(said) + (f" ({place})" if place else ""))


def _rewards(live: _Conversation, actions: Sequence[Action], said: Reply) -> dict[int, float]:
    """Return the rewards of a reply by turn. Raises ValueError for a turn that there is not, and for a number that is
    not finite.
    """
    rewards = {int(turn): float(reward) for turn, reward in said.rewards.items()}
    if said.reward:
        own = actions[-1].turn if len(actions) == 1 or said.after_turn is None else said.after_turn
        rewards[own] = rewards.get(own, 0.0) + float(said.reward)
    for turn, reward in rewards.items():
        if turn not in live.turns:
            raise ValueError(f"rewards has the turn {turn}, expected turns so far: {sorted(live.turns)}")
        if not math.isfinite(reward):
            raise ValueError(f"the reward is {reward}, expected a finite number")
    return rewards
