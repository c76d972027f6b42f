"""Compare a tokenizer with the model's embedding, and with the tokenizers of the run's other models."""

import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megarl.data.chat import render_chats
from megarl.data.stop_tokens import ANSWER, QUESTION
from megarl.data.tokenizer_files import read_tokenizer
from megarl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REMEDY = "resize the model's embeddings, or remove the token from the tokenizer"


def check_vocabulary(tokenizer: "PreTrainedTokenizerBase", path: str, key: str) -> None:
    """Raise ConfigError unless the model at `path`, set by the setting `key`, has the same tokens as `tokenizer`."""
    ours, theirs = tokenizer.get_vocab(), read_tokenizer(path, key).get_vocab()
    if ours != theirs:
        differing = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
        raise ConfigError(
            f"{key}: the tokenizer in {path} differs from that of model.path in {len(differing)} tokens, such as "
            f"{differing[0]!r}; use a model with the same tokenizer"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The tokens of a tokenizer for which the model's embedding has a row, and those for which it has none.

    Most tokenizers have none of the latter, and many models have more rows than tokens. num_rows: `vocab_size` of the
    model, before rows are padded. lacking: texts by id, of the tokens without a row. name: the model, in messages.
    """

    num_rows: int
    lacking: Mapping[int, str] = field(default_factory=dict)
    name: str = "the model"

    @classmethod
    def of(cls, tokenizer: "PreTrainedTokenizerBase", num_rows: int, key: str = "model.path") -> "Vocabulary":
        """Compare a tokenizer with the model of `key`; ConfigError if its template needs tokens without a row."""
        lacking = {id: token for token, id in tokenizer.get_vocab().items() if id >= num_rows}
        vocabulary = cls(num_rows=num_rows, lacking=lacking, name=f"the model of {key}")
        if lacking:
            texts = [
                *render_chats(tokenizer, [[QUESTION]]),
                *render_chats(tokenizer, [[QUESTION, ANSWER]], add_generation_prompt=False),
            ]
            written = [id for ids in tokenizer(texts, add_special_tokens=False)["input_ids"] for id in ids]
            for ids, what in ((written, "chat template writes"), ([tokenizer.eos_token_id], "eos_token is")):
                if problem := vocabulary._problem(ids):
                    raise ConfigError(f"{key}: the tokenizer's {what} {problem}")
        return vocabulary

    def require(self, ids: Iterable[int], where: str) -> None:
        """Raise DataError, which names the row (`where`), if one of its tokens has no row in the embedding."""
        if self.lacking and (problem := self._problem(ids)):
            raise DataError(f"{where}: has {problem}")

    def require_all(self, key: str, unknown_texts: Collection[str]) -> None:
        """Raise ConfigError for any token without a row if texts that only come up during the run may have it.

        key: the setting of the model. unknown_texts: where such texts come from; none: only files are read.
        """
        if self.lacking and unknown_texts:
            raise ConfigError(
                f"{key}: the tokenizer has {self._problem(self.lacking)}; {' and '.join(unknown_texts)} may write it"
            )

    @property
    def warnings(self) -> list[str]:
        """List that there are tokens without a row, which nothing that was checked contains."""
        if not self.lacking:
            return []
        return [
            f"the tokenizer has {len(self.lacking)} tokens, such as {min(self.lacking.items())[1]!r}, for which "
            f"{self.name} (vocab_size={self.num_rows}) has no row in its embedding; no row of the data uses them"
        ]

    def _problem(self, ids: Iterable[int]) -> str | None:
        found = next((id for id in ids if id >= self.num_rows), None)
        if found is None:
            return None
        return (
            f"the token {self.lacking.get(found, '')!r} with id {found}, for which {self.name} has no row in its "
            f"embedding (vocab_size={self.num_rows}); {_REMEDY}"
        )


# For data that no model reads.
EVERY_TOKEN = Vocabulary(num_rows=sys.maxsize)
