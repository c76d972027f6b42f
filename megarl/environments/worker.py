"""Run the environments of thousands of conversations in one asyncio loop, and turn their replies into tokens."""

import asyncio
import json
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from megarl.config.environments import EnvironmentConfig
from megarl.config.schema import DataConfig
from megarl.data.answers import response_decoder
from megarl.data.chat import load_tokenizer
from megarl.data.images import DataImages
from megarl.data.turns import InterTurnTokens
from megarl.environments.base import Action, Environment, Reply, SideRequest, open_environments, short
from megarl.environments.calls import THREADS, LateError, attempt, causes_of, describe, is_exhaustion, late_calls
from megarl.environments.images import Read, ReplyImages
from megarl.host.clock import awake_s
from megarl.host.streams import print_lines
from megarl.host.unicode import readable
from megarl.host.user_code import place_of
from megarl.types import ChatPart, Message
from megarl.types.episodes import EpisodeReply, StartRequest, TriesRequest, TurnRequest

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
    marks_texts: whether replies say which tokens are the environment's own text. form, store: with which images are
    read, and where they are kept; None: conversations are texts.
    """

    model_path: str
    chat_template: Mapping[str, object]
    names: tuple[str, ...]
    config: EnvironmentConfig
    max_prompt_tokens: int | None = None
    marks_texts: bool = False
    form: DataConfig = field(default_factory=DataConfig)
    store: str | None = None


@dataclass(slots=True, kw_only=True)
class _Conversation:
    """A conversation that has begun. chat: the messages that the policy reads for its next turn. asked: those of each
    turn that it writes at the same time. turns: each turn's last token, and the messages up to and with it, by its
    number. part: what the environment said last.
    """

    environment: Environment
    began: float
    chat: Sequence[Message]
    asked: list[Sequence[Message]] = field(default_factory=list)
    turns: dict[int, tuple[int, Sequence[Message]]] = field(default_factory=dict)
    part: ChatPart | None = None

    def hear(self, messages: Sequence[Message], after: int | None) -> None:
        """Let the policy read messages next, after the turn of a number, or as the whole chat."""
        self.chat = [*([] if after is None else self.turns[after][1]), *messages]
        self.part = ChatPart(turn=len(self.turns) + len(self.asked), messages=tuple(messages), after=after)

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
        if (data := DataImages.of(spec.model_path, spec.form, spec.store)) is not None:
            data.keeps = True
        self._images = ReplyImages(data)
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
            environment.read_image = self._images.read
            asked = replace(request.prompt, messages=tuple(map(self._images.sent, request.prompt.messages)))
            live = _Conversation(environment=environment, began=began, chat=request.prompt.messages)
            self._live[key] = live
            # Without its messages, as checkpoints of earlier versions have it, a conversation is not rendered again.
            if request.turns and (request.chat or self._config.history == "written"):
                actions = [Action(text=self._decode(ids), turn=i) for i, ids in enumerate(request.turns)]
                if await environment.resume(asked, actions):
                    live.recall([ids[-1] for ids in request.turns], [each.text for each in actions], request.chat)
                    return EpisodeReply(**self._next_turns(live))
            opening = [self._heard(each) for each in short(await environment.start(asked))]
            if opening:
                live.hear(opening if environment.owns_prompt else [*live.chat, *opening], None)
            ids, images, _ = self._opening(live.chat, environment.tools) if opening else ((), (), ())
            if (limit := self._spec.max_prompt_tokens) is not None and len(ids) > limit:
                raise ValueError(f"the opening makes a prompt of {len(ids)} tokens, data.max_prompt_tokens is {limit}")
            part = live.part if self._config.history == "rendered" else None
            told = self._next_turns(live)
            return EpisodeReply(token_ids=ids, images=images, is_anew=bool(request.turns), part=part, **told)

        return await self._limited(begin)

    async def act(self, key: int, request: TurnRequest | TriesRequest) -> EpisodeReply:
        """Pass a turn of the policy, or all tries of a turn, to its environment, and return the reply."""
        live = self._live[key]
        environment = live.environment
        tries = request.tries if isinstance(request, TriesRequest) else (request,)

        async def reply() -> EpisodeReply:
            actions = []
            # A turn that begins with a demonstration is written alone.
            for each, chat in zip(tries, live.asked, strict=False):
                action = Action(
                    text=self._decode(list(each.token_ids)),
                    turn=each.turn,
                    is_cut=each.is_cut,
                    num_tokens=len(each.token_ids),
                    num_before=each.num_before,
                )
                turn = Message(role="assistant", content=action.text)
                live.turns[action.turn] = each.token_ids[-1], [*chat, turn]
                actions.append(action)
            said = await (environment.reply(actions[0]) if len(actions) == 1 else environment.choose(actions))
            live.asked = []
            rewards = _rewards(live, actions, said)
            follows: dict[str, Any] = {}
            if not said.done:
                follows = self._following(live, actions, said, environment.tools)
                follows |= self._next_turns(live)
            return EpisodeReply(
                done=bool(said.done),
                reward=rewards.pop(actions[-1].turn, 0.0),
                rewards=rewards,
                num_calls=int(said.num_calls),
                details=said.details,
                **follows,
            )

        return await self._limited(reply, left_s=self._config.episode_timeout_s - (awake_s() - live.began))

    def _next_turns(self, live: _Conversation) -> dict[str, Any]:
        """Return what an environment says of the turns that the policy writes next, as fields of a reply."""
        most, live.asked = self._config.max_turns, []
        beside: list[EpisodeReply] = []

        def fields(said: Environment | SideRequest) -> dict[str, Any]:
            if not 1 <= said.num_tries <= most:
                raise ValueError(f"num_tries is {said.num_tries}, expected 1 to environment.max_turns={most}")
            live.asked += [live.chat] * said.num_tries
            limit = None if said.max_turn_tokens is None else int(said.max_turn_tokens)
            told = {"max_turn_tokens": limit, "num_tries": int(said.num_tries), "trains": bool(said.trains)}
            return told | {"stop": tuple(said.stop)}

        told = fields(live.environment)
        for each in live.environment.beside:
            said = Reply(messages=each.messages, after_turn=each.after_turn, context=each.context)
            follows = self._following(live, (), said, each.tools)
            beside.append(EpisodeReply(**follows, **fields(each)))
        return {**told, "beside": tuple(beside)}

    def _count_tokens(self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]]) -> int:
        return len(self._opening([self._heard(each) for each in messages], tools)[0])

    def _heard(self, message: Message) -> Message:
        """Return a message as a conversation keeps it."""
        return self._images.kept(self._inter_turn.plain(message))

    def _opening(self, chat: Sequence[Message], tools: Sequence[Mapping[str, object]]) -> Read:
        return self._images.expanded(self._inter_turn.opening(chat, tools), chat)

    def _following(
        self, live: _Conversation, actions: Sequence[Action], said: Reply, tools: Sequence[Mapping[str, object]]
    ) -> dict[str, Any]:
        """Return, as fields of a reply, the tokens that the policy reads after a turn or its tries, and where they
        stand.
        """
        if not said.messages and not said.context:
            raise ValueError("the reply has no messages, and does not end the conversation; set done=True")
        role, inter_turn, is_rendered = self._config.tool_role, self._inter_turn, self._config.history == "rendered"
        messages = [replace(m, role=role) if m.role == "tool" else m for m in short(said.context or said.messages)]
        # The policy's own turns spell no special token.
        plain = [each if each.role == "assistant" else self._heard(each) for each in messages]
        after = said.after_turn
        if after is None and len(actions) == 1 and not said.context:
            after = actions[0].turn
        if after not in live.turns and not (said.context and after is None):
            raise ValueError(f"after_turn is {after}, expected a turn so far: {sorted(live.turns)}")
        live.hear(plain, None if said.context else after)
        told = {"after_turn": after, "part": live.part if is_rendered else None}
        if said.context:
            # Nothing in it is an observation, as it repeats what was said before.
            texts = () if self._spec.marks_texts else None
            shown, images, _ = self._opening(plain, tools)
            return told | {"token_ids": shown, "images": images, "observed": texts, "is_context": True}
        assert after is not None, "messages follow a turn"
        last_token, chat = live.turns[after]
        turn, num_repeated = chat[-1].content, 0
        ids = inter_turn.between(messages, last_token=last_token, turn=turn)
        render: Callable[[Sequence[Message]], str] = partial(inter_turn.follows, turn=turn)
        if is_rendered:
            written, whole = inter_turn.text(chat[:-1], tools) + chat[-1].content, partial(inter_turn.text, tools=tools)
            if not whole(live.chat).startswith(written):
                ids, render, num_repeated = inter_turn.opening(live.chat, tools), whole, len(chat)
        own_texts: list[tuple[int, int]] = []
        read = live.chat[len(chat) - num_repeated :]
        if self._spec.marks_texts:
            own = [num_repeated + i for i, m in enumerate(messages) if m.role != "assistant" and i not in said.warnings]
            own_texts = inter_turn.own_texts(ids, read, own, render)
        shown, images, observed = self._images.expanded(ids, read, own_texts)
        own_places = observed if self._spec.marks_texts else None
        return told | {"token_ids": shown, "images": images, "observed": own_places, "is_context": num_repeated > 0}

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
        if len(late := late_calls()) >= MOST_LATE_CALLS:
            names = ", ".join(f"{name} {count} times" for name, count in Counter(late).most_common(3))
            worn_out = f"{len(late)} calls never returned: {names}; give what they wait for a time limit of its own"
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
