"""Define what passes between the driver, which has the state of conversations, and workers, which run environments."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megarl.types.images import RowImage
from megarl.types.samples import ChatPart, Prompt


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
    """A request to reply to turns that were written at the same time, such as several tries of one."""

    tries: tuple[TurnRequest, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeReply:
    """The result of a request to a worker.

    token_ids: after a turn, what follows it up to the policy's next turn; after a start, the whole prompt if the
    environment added messages to it, else nothing. images: what these tokens show. after_turn: the number of the turn
    that they follow; None: the last. is_context: they are instead all that the policy reads next. observed: bounds, in
    `token_ids`, of the texts of its messages; None: nobody asked. max_turn_tokens: the environment's limit of the next
    turn. stop: texts that end it. num_tries: how many times the policy writes it. trains: whether it trains. beside:
    what the policy reads for further turns that it writes at the same time. rewards: those of turns by their numbers,
    besides `reward` of the last one. is_anew: a conversation that was to go on begins again. part: what was said, where
    the history is rendered, so that the conversation can go on elsewhere. failure: the kind of failure (`raised`,
    `timed_out`, `died`), in which case the rest says nothing; reason: one line. worn_out: why the worker is to be
    replaced; empty: it is not.
    """

    token_ids: tuple[int, ...] = ()
    images: tuple[RowImage, ...] = ()
    max_turn_tokens: int | None = None
    stop: tuple[str, ...] = ()
    num_tries: int = 1
    trains: bool = True
    beside: "tuple[EpisodeReply, ...]" = ()
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
