"""Small tokenizers of the kinds that models have, trained on a few lines."""

from collections.abc import Callable

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

MARKS = ("<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>")
CORPUS = (
    "user\nWhat is 1 + 2? The answer is 3.\n\nSo the answer is 12.\nassistant\nThe answer is: 3, isn't it?",
    "  The question is what the answer is.\n\n\n1 2 3 The user: (so), The assistant. Answer 2!",
) * 3
# The characters that the corpus has, so that no token is unknown.
ALPHABET = "".join(sorted(set("".join(CORPUS))))
SPACE = "\u2581"
_TRAINING = {"vocab_size": 200, "special_tokens": ["<unk>"], "show_progress": False}


def _bpe() -> tuple[models.Model, trainers.Trainer]:
    return models.BPE(unk_token="<unk>"), trainers.BpeTrainer(**_TRAINING)


def _byte_level(*, add_prefix_space: bool) -> Tokenizer:
    model, trainer = _bpe()
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _words(scheme: str) -> pre_tokenizers.PreTokenizer:
    """As SentencePiece has it: spaces belong to the words after them, and line feeds are tokens of their own."""
    metaspace = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme)
    return pre_tokenizers.Sequence([metaspace, pre_tokenizers.Split("\n", "isolated")])


def _metaspace(scheme: str) -> Tokenizer:
    model, trainer = _bpe()
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = _words(scheme)
    tokenizer.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme=scheme)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _legacy_llama() -> Tokenizer:
    """As Llama 2 was converted: with a normalizer instead of a pre-tokenizer, so that words may merge."""
    model, trainer = _bpe()
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    # For training alone, so that no token is more than a word.
    tokenizer.pre_tokenizer = _words("never")
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.pre_tokenizer = None
    return tokenizer


def _unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = _words("always")
    tokenizer.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme="always")
    tokenizer.train_from_iterator(CORPUS, trainers.UnigramTrainer(**_TRAINING, unk_token="<unk>"))
    return tokenizer


def _word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    # Every character begins words, and goes on with them.
    words = [*ALPHABET.split(), *(first + each for each in "".join(ALPHABET.split()) for first in "aA1")]
    tokenizer.train_from_iterator([*CORPUS, *words], trainers.WordPieceTrainer(**_TRAINING))
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": lambda: _byte_level(add_prefix_space=False),
    "byte-level with a space before": lambda: _byte_level(add_prefix_space=True),
    "Metaspace, always": lambda: _metaspace("always"),
    "Metaspace, first": lambda: _metaspace("first"),
    "Metaspace, never": lambda: _metaspace("never"),
    "legacy Llama": _legacy_llama,
    "unigram": _unigram,
    "WordPiece": _word_piece,
}


def make_tokenizer(kind: str, template: str) -> PreTrainedTokenizerBase:
    """A tokenizer whose eos token is </s>; all of `MARKS` are tokens."""
    backend = KINDS[kind]()
    backend.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = template
    return tokenizer
