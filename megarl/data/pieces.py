"""Encode consecutive pieces of a text so that their tokens, joined, are those of the whole text.

A piece that is tokenised by itself may get other tokens: SentencePiece writes a space before the first word of a text,
and words that two pieces share become one token.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# At least one of these does not merge with what follows it.
_NEIGHBOURS = ("\n", "a", ".", "1", " ")


def encode(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Encode a text as it is, without the tokens that a tokenizer adds to texts that are not chats."""
    return encode_texts(tokenizer, [text])[0]


def encode_texts(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]) -> list[list[int]]:
    """Encode texts as `encode` does, in one call, as a call costs more than a text."""
    from transformers import PreTrainedTokenizerFast as Usual  # takes a second of each process that encodes nothing

    kind = type(tokenizer)
    if issubclass(kind, Usual) and (kind.__call__, kind._encode_plus) == (Usual.__call__, Usual._encode_plus):
        library = tokenizer.backend_tokenizer
        settings = (library.truncation, library.padding, library.encode_special_tokens, tokenizer.split_special_tokens)
        if settings == (None, None, False, False):
            # The same tokens; transformers also has the place of each in the text looked up, which takes as long.
            return [each.ids for each in library.encode_batch_fast(list(texts), add_special_tokens=False)]
    ids: list[list[int]] = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False)["input_ids"]
    return ids


def encode_pieces(tokenizer: "PreTrainedTokenizerBase", pieces: Sequence[str], *, mark: str = "") -> list[list[int]]:
    """Encode each piece of a text after the pieces before it.

    Where no token of the whole text reaches over the end of a piece, the tokens are those of the whole text. Otherwise
    the tokens before the end stay as they are without the next piece, as those of a prompt do that a policy continues,
    and the next piece is encoded as in a text in which it does not merge with what stands before it.

    mark: the text of an added token. The text after it is encoded without regard to the text before it, so that
    long chats take time in proportion to their length.
    """
    contexts = [""]
    for piece in pieces:
        context = contexts[-1] + piece
        contexts.append(context[max(context.rfind(mark), 0) :] if mark else context)
    texts = list(dict.fromkeys([*contexts[:-1], *map("".join, zip(contexts, pieces, strict=False))]))
    ids = dict(zip(texts, encode_texts(tokenizer, texts), strict=True))
    found: list[list[int]] = []
    for context, piece in zip(contexts, pieces, strict=False):
        found.append(encode_after(tokenizer, ids[context], piece, ids[context + piece]))
    return found


def encode_after(tokenizer: "PreTrainedTokenizerBase", before: list[int], piece: str, whole: list[int]) -> list[int]:
    """Encode a piece after the tokens `before`: as the rest of `whole`, the tokens of both, if these begin with them.

    Otherwise the piece's first characters would merge with `before`. It is then encoded so that the text is that of
    `whole`; if no way is found, as a text of its own.
    """
    if whole[: len(before)] == before:
        return whole[len(before) :]
    alone = encode(tokenizer, piece)
    candidates = [alone]
    for neighbour in _NEIGHBOURS:
        context, both = encode(tokenizer, neighbour), encode(tokenizer, neighbour + piece)
        if context and both[: len(context)] == context:
            candidates.append(both[len(context) :])

    def text_of(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    return next((ids for ids in candidates if text_of([*before, *ids]) == text_of(whole)), alone)
