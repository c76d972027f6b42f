"""Pieces of a text have the tokens of the whole."""

from megarl.data.pieces import encode, encode_pieces
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
