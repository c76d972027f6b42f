"""Encode chats as token ids with the tokenizer's chat template, and load tokenizers, from local directories only."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from megarl.data.tokenizer_files import parse_template, read_tokenizer
from megarl.errors import ConfigError, DataError
from megarl.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Chat templates of reasoning models may already open the thinking block in the prompt.
THINK_OPENING = "<think>\n"


def load_tokenizer(
    path: str | Path, key: str = "model.path", arguments: Mapping[str, Any] | None = None
) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a model directory, and fix arguments of its chat template.

    key: the setting that named the directory, for messages. arguments: `data.chat_template`, applied to every chat that
    is rendered.

    Raises:
        ConfigError: a file is damaged, there is no chat template or eos token, the template is not valid Jinja, or it
            never reads an argument.
    """
    tokenizer = read_tokenizer(path, key)
    if tokenizer.chat_template is None:
        raise ConfigError(f"{key}: the tokenizer in {path} has no chat template; add chat_template.jinja")
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"{key}: the tokenizer in {path} has no eos_token; set it in tokenizer_config.json")
    template, read = parse_template(tokenizer, Path(path))
    if arguments:
        _require_read(arguments, read, tokenizer, path)
        # transformers drops the line feed after a block, so that these lines write nothing. Jinja reads Python's
        # literals, True and None included.
        lines = "".join(f"{{% set {name} = {value!r} %}}\n" for name, value in arguments.items())
        tokenizer.chat_template = lines + template
    return tokenizer


def check_vocabulary(tokenizer: "PreTrainedTokenizerBase", path: str, key: str) -> None:
    """Raise ConfigError unless the model at `path`, set by the setting `key`, has the same tokens as `tokenizer`."""
    ours, theirs = tokenizer.get_vocab(), read_tokenizer(path, key).get_vocab()
    if ours != theirs:
        differing = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
        raise ConfigError(
            f"{key}: the tokenizer in {path} differs from that of model.path in {len(differing)} tokens, such as "
            f"{differing[0]!r}; use a model with the same tokenizer"
        )


def _require_read(
    arguments: Mapping[str, Any], read: frozenset[str], tokenizer: "PreTrainedTokenizerBase", path: str | Path
) -> None:
    """Raise ConfigError if `arguments` (`data.chat_template`) has an argument that is none of the variables that the
    chat template reads.
    """
    free = sorted(read - tokenizer.special_tokens_map.keys())
    for name in arguments:
        if name not in free:
            reads = f"it may read {', '.join(free)}" if free else "it reads no arguments"
            raise ConfigError(f"data.chat_template.{name}: the chat template in {path} never reads this; {reads}")


def encode_chats(
    tokenizer: "PreTrainedTokenizerBase",
    chats: Sequence[Sequence[Message]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[list[int]]:
    """Encode chats as token ids with the tokenizer's chat template.

    Args:
        add_generation_prompt: end each chat with the start of an assistant turn, as in a prompt for generation.
        tools: schemas of functions in OpenAI's form, for the template to write. ConfigError if it never reads any.
    """
    texts = render_chats(tokenizer, chats, add_generation_prompt=add_generation_prompt, tools=tools)
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
    return ids


def long_prompt_error(
    where: str, num_tokens: int, max_prompt_tokens: int, key: str = "data.on_long_prompt"
) -> DataError:
    """Return the error for a prompt that has more tokens than the limit; setting `key` can have it left out."""
    return DataError(
        f"{where}: the prompt has {num_tokens} tokens, data.max_prompt_tokens is {max_prompt_tokens}; "
        f"raise it or set {key}=drop"
    )


def encode_demonstration(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    target: str,
    *,
    where: str = "demonstration",
) -> list[int]:
    """Encode `target` as the policy would have written it after `messages`, with one eos token at the end.

    A leading think tag is dropped if the template's prompt already ends with it. Raises DataError if `target` has
    an eos token before its end, or nothing but an eos token.
    """
    if target.startswith(THINK_OPENING) and render_chats(tokenizer, [messages])[0].endswith(THINK_OPENING):
        target = target.removeprefix(THINK_OPENING)
    eos: int = tokenizer.eos_token_id
    ids: list[int] = tokenizer(target, add_special_tokens=False)["input_ids"]
    if not ids or ids[-1] != eos:
        ids = [*ids, eos]
    if ids.index(eos) != len(ids) - 1 or len(ids) == 1:
        raise DataError(
            f"{where}: the target is {target[:80]!r}, expected text with {tokenizer.eos_token!r} nowhere but at its end"
        )
    return ids


def encode_turns(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], trained: Sequence[int], *, where: str
) -> tuple[list[int], list[bool]]:
    """Encode a chat up to its last answer in `trained`; return token ids, and a mask of the tokens of these answers.

    Each answer is encoded as the policy would have written it after the turns before it (`encode_demonstration`), end
    token included. The text between two answers is tokenised by itself, as in a chat in which the policy spoke.

    Raises:
        DataError: the chat template refuses the chat; or before a later answer it renders an earlier one in another way
            than the policy wrote it (for example without its thoughts), so that one sequence cannot train both.
    """
    openings = _render_row(tokenizer, [messages[:i] for i in trained], where)
    ids: list[int] = []
    mask: list[bool] = []
    encoded = ""
    for i, opening, following in zip(trained, openings, [*openings[1:], None], strict=True):
        end = "" if messages[i].content.endswith(tokenizer.eos_token) else tokenizer.eos_token
        # Many templates strip the answers that they repeat.
        answers = (messages[i].content, messages[i].content.strip())
        answer = next((a for a in answers if following is None or following.startswith(opening + a + end)), None)
        if answer is None:
            raise DataError(
                f"{where}: before the next answer, the chat template renders turn {i} as "
                f"{(following or '')[len(opening) :][:80]!r}, expected {answers[0][:40]!r} and the end token; "
                "set sft.train_on to each, for a row per answer, or to last"
            )
        between = tokenizer(opening[len(encoded) :], add_special_tokens=False)["input_ids"]
        response = encode_demonstration(tokenizer, messages[:i], answer, where=f"{where}: turn {i}")
        ids += between + response
        mask += [False] * len(between) + [True] * len(response)
        encoded = opening + answer + end
    return ids, mask


def has_own_answer_form(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Return whether the chat template puts an answer between other marks than the policy's prompt and the eos token.

    Gemma's template ends turns with a token that is not the eos token, and Mistral's begins answers with a space.
    Returns False if the template also changes the answer itself, for example by adding thoughts.
    """
    question, answer = Message(role="user", content="?"), Message(role="assistant", content="!")
    chats = [[question, answer], [question, answer, question]]
    try:
        (prompt,) = render_chats(tokenizer, [[question]])
        closed, followed = render_chats(tokenizer, chats, add_generation_prompt=False)
    except TemplateError:
        return False
    if closed.startswith(f"{prompt}{answer.content}{tokenizer.eos_token}"):
        return False
    keeps_answer = closed.startswith(prompt) and closed[len(prompt) :].lstrip().startswith(answer.content)
    return keeps_answer and followed.startswith(closed) and tokenizer.is_fast


def encode_rendered_turns(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], trained: Sequence[int], *, where: str
) -> tuple[list[int], list[bool]]:
    """Encode a chat up to its last answer in `trained` as the chat template renders it; return token ids, and a mask of
    the tokens of these answers.

    An answer is what the template adds to its prompt for this answer, the mark at the end of the turn included, without
    spaces after that. For templates for which `has_own_answer_form` is true.

    Raises:
        DataError: the chat template refuses the chat; or its rendering up to an answer is not how the whole chat
            begins, so that one sequence cannot train the answer.
    """
    prompts = _render_row(tokenizer, [messages[:i] for i in trained], where)
    closed = _render_row(tokenizer, [messages[: i + 1] for i in trained], where, add_generation_prompt=False)
    whole = closed[-1].rstrip()
    spans: list[tuple[int, int]] = []
    for i, prompt, end in zip(trained, prompts, (text.rstrip() for text in closed), strict=True):
        if not messages[i].content.strip():
            raise DataError(f"{where}: turn {i}: the target is {messages[i].content!r}, expected text")
        if not (whole.startswith(end) and end.startswith(prompt)):
            raise DataError(
                f"{where}: up to turn {i} the chat template renders {end[-80:]!r}, but the whole chat goes on from "
                f"{whole[: len(end)][-80:]!r}; set sft.train_on to each, for a row per answer, or to last"
            )
        spans.append((len(prompt), len(end)))
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    # A token that begins before the answer belongs to the prompt.
    mask = [any(start <= first < end for start, end in spans) for first, _ in encoded["offset_mapping"]]
    return encoded["input_ids"], mask


def encode_whole(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], *, where: str
) -> tuple[list[int], list[bool]]:
    """Encode a chat as the chat template renders it; return token ids, and a mask of all but the first of them.

    Raises DataError, which names the row (`where`), if the chat template refuses the chat.
    """
    (text,) = _render_row(tokenizer, [messages], where, add_generation_prompt=False)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids, [False] + [True] * (len(ids) - 1)


def _render_row(
    tokenizer: "PreTrainedTokenizerBase",
    chats: Sequence[Sequence[Message]],
    where: str,
    *,
    add_generation_prompt: bool = True,
) -> list[str]:
    """Render chats of one row, whose name is `where`; DataError if the template refuses them."""
    try:
        return render_chats(tokenizer, chats, add_generation_prompt=add_generation_prompt)
    except TemplateError as error:
        raise DataError(
            f"{where}: the chat template refuses the roles {[message.role for message in chats[-1]]}: {error}; correct "
            "or remove the row"
        ) from error


def response_decoder(tokenizer: "PreTrainedTokenizerBase") -> Callable[[Sequence[int]], str]:
    """Return a function that decodes response ids to the text that scorers read, without special tokens."""
    return partial(tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def token_texts(tokenizer: "PreTrainedTokenizerBase", ids: Sequence[int]) -> list[str]:
    """Return the text of each token. If several tokens make up one character, the last of them has its whole text."""
    decode = partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    texts: list[str] = []
    # Tokens from `start` on are decoded with those before `known` as context, as spaces may depend on it.
    start = known = 0
    for end in range(1, len(ids) + 1):
        context, whole = decode(ids[start:known]), decode(ids[start:end])
        is_whole = not whole.endswith("\ufffd") or end == len(ids)
        texts.append(whole[len(context) :] if is_whole else "")
        if is_whole:
            start, known = known, end
    return texts


def turn_ending(tokenizer: "PreTrainedTokenizerBase") -> list[int] | None:
    """Return the token ids that the chat template writes after the eos token of an answer.

    Returns None if the template does not reproduce prompt, answer and eos token as the policy writes them, for example
    because it removes or adds reasoning.
    """
    question, answer = Message(role="user", content="?"), Message(role="assistant", content="!")
    prompt = render_chats(tokenizer, [[question]])[0]
    whole = render_chats(tokenizer, [[question, answer]], add_generation_prompt=False)[0]
    written = f"{prompt}{answer.content}{tokenizer.eos_token}"
    if not whole.startswith(written):
        return None
    ids: list[int] = tokenizer(whole.removeprefix(written), add_special_tokens=False)["input_ids"]
    return ids


def render_chats(
    tokenizer: "PreTrainedTokenizerBase",
    chats: Sequence[Sequence[Message]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[str]:
    """Render chats as text with the chat template. For the arguments see `encode_chats`."""
    if tools and "tools" not in str(tokenizer.get_chat_template(tools=list(tools))):
        raise ConfigError(
            "environment: the chat template writes no tools; name them in data.system_prompt, and set the argument "
            "in_prompt of the environment to false"
        )
    conversations = [[message.as_dict() for message in chat] for chat in chats]
    texts: list[str] = tokenizer.apply_chat_template(
        conversations, tokenize=False, add_generation_prompt=add_generation_prompt, tools=list(tools) or None
    )
    return texts
