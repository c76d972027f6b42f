"""Pieces of a text have the tokens of the whole."""

from megarl.data.pieces import encode, encode_pieces
from tests.helpers.tokenizers import make_tokenizer


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
