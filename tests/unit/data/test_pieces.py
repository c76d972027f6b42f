"""Pieces of a text have the tokens of the whole."""

from megarl.data.pieces import encode, encode_pieces, encode_texts
from megarl_lab.recipes.tiny_model import make_byte_tokenizer
from tests.helpers.tokenizers import make_tokenizer


def test_pieces_join_where_tokens_end() -> None:
    tokenizer = make_tokenizer("byte-level", "")
    text = "The answer is 3."
    assert encode_pieces(tokenizer, ["The", " answer", " is 3."]) == [
        encode(tokenizer, piece) for piece in ("The", " answer", " is 3.")
    ]
    first, second = encode_pieces(tokenizer, [text[:6], text[6:]])
    assert first == encode(tokenizer, "The an")
    assert tokenizer.decode([*first, *second]) == text


def test_a_piece_that_follows_others_does_not_begin_a_text() -> None:
    """SentencePiece writes a space before the first word of a text, and before no other."""
    tokenizer = make_tokenizer("Metaspace, first", "")
    shown = tokenizer.convert_ids_to_tokens
    assert shown(encode(tokenizer, "The")) == ["\u2581The"]
    pieces = ["<|user|>\n", "The", "</s>", "\n", "The 1"]
    for mark in ("", "</s>"):
        ids = encode_pieces(tokenizer, pieces, mark=mark)
        assert ["".join(shown(each)) for each in ids] == ["<|user|>\n", "The", "</s>", "\n", "The\u25811"]
        assert [token for each in ids for token in each] == encode(tokenizer, "".join(pieces))


def test_settings_of_a_tokenizer_count_as_in_transformers() -> None:
    """One whose file cuts and pads texts does so with none; one that reads marks as text, and one with a way of its
    own, do so with all.
    """
    tokenizer = make_byte_tokenizer()
    ids = [tokenizer.convert_tokens_to_ids(each) for each in "abcd"]
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=9)
    assert encode_texts(tokenizer, ["abcd", "b"]) == [ids, ids[1:2]]
    assert encode(tokenizer, "a<|im_end|>") == [ids[0], tokenizer.eos_token_id]
    tokenizer.split_special_tokens = True
    assert len(encode(tokenizer, "a<|im_end|>")) == len("a<|im_end|>")

    class Other(type(tokenizer)):  # type: ignore[misc]
        def __call__(self, texts: list[str], **_: object) -> dict[str, list[list[int]]]:
            return {"input_ids": [[len(text)] for text in texts]}

    tokenizer.__class__ = Other
    assert encode(tokenizer, "abcd") == [4]
