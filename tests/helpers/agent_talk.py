"""Lead the conversation of an agent at an environment worker: a test writes the policy's turns."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megarl.config.environments import EnvironmentConfig, EnvironmentEntry
from megarl.environments.worker import EnvironmentWorker, WorkerSpec
from megarl.types import Message, Prompt
from megarl.types.episodes import EpisodeReply, StartRequest, TriesRequest, TurnRequest
from megarl_lab.recipes.tiny_model import make_byte_tokenizer

TOKENIZER = make_byte_tokenizer()
TOKENIZER.chat_template = (
    "{% if tools %}<|im_start|>tools\n{{ tools | map(attribute='function.name') | join(' ') }}<|im_end|>\n{% endif %}"
    + str(TOKENIZER.chat_template)
)
END = 2


@dataclass
class Talk:
    """What a conversation became: the host's replies, and the tokens of prompt, turns and inter_turn."""

    replies: list[EpisodeReply] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @property
    def text(self) -> str:
        return str(TOKENIZER.decode(self.tokens))

    @property
    def last(self) -> EpisodeReply:
        return self.replies[-1]


async def converse(
    arguments: Mapping[str, Any],
    *turns: str | tuple[str, ...],
    think_s: float = 0.0,
    max_prompt_tokens: int | None = None,
    kind: str = "agent",
    extra_info: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
    **limits: Any,
) -> Talk:
    """Lead a conversation in which the policy says `turns`, each after a while; one that ends in … was cut, and one of
    several texts was tried so often.
    """
    config = EnvironmentConfig(
        entries={"mine": EnvironmentEntry(type=kind, arguments=arguments)}, **{"reply_timeout_s": 200.0} | limits
    )
    spec = WorkerSpec(
        model_path="",
        chat_template={},
        names=("mine",),
        config=config,
        max_prompt_tokens=max_prompt_tokens,
    )
    tokenizer = tokenizer or TOKENIZER
    host = EnvironmentWorker(spec, tokenizer)
    row = Prompt(
        uid="a",
        token_ids=(5,),
        data_source="d",
        ground_truth="3",
        messages=(Message(role="user", content="1+2?"),),
        extra_info={"level": 2, "max_tokens": 40} if extra_info is None else extra_info,
        environment="mine",
    )
    talk = Talk(replies=[await host.start(7, StartRequest(prompt=row))])
    talk.tokens += talk.last.token_ids
    number, said = 0, [*turns]
    while said and not talk.last.done and not talk.last.failure:
        await asyncio.sleep(think_s)
        tries, beside = [], [*talk.last.beside]
        texts = (first,) if isinstance(first := said.pop(0), str) else first
        # Turns of several chats at the same time are given one after the other.
        texts = [*texts, *(said.pop(0) for _ in beside)]
        for text in texts:
            is_cut = text.endswith("…")
            end = [] if is_cut or text.endswith("<|call|>") else [tokenizer.eos_token_id]
            ids = tokenizer(text, add_special_tokens=False)["input_ids"] + end
            tries.append(TurnRequest(token_ids=ids, turn=number, is_cut=is_cut, num_before=len(talk.tokens)))
            number += 1
            talk.tokens += ids
            if beside and len(tries) >= talk.last.num_tries:
                talk.tokens += beside.pop(0).token_ids
        talk.replies.append(await host.act(7, tries[0] if len(tries) == 1 else TriesRequest(tries=tuple(tries))))
        talk.tokens += talk.last.token_ids
    await host.close(7)
    return talk


def lead(agent: Callable[..., Any] | None, *turns: str | tuple[str, ...], **settings: Any) -> Talk:
    return asyncio.run(converse({"agent": agent}, *turns, **settings))
