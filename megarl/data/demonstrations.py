"""Provide the data set of supervised fine-tuning: chats and demonstrations, tokenised and checked when it is opened."""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megarl.config.schema import DataConfig, SftConfig
from megarl.data.answers import Answers
from megarl.data.chat import long_prompt_error, render_chats, require_system_turn
from megarl.data.files import RowFiles
from megarl.data.records import DemonstrationRecord, demonstration_columns, parse_demonstration
from megarl.data.special_tokens import SpelledSpecialTokens
from megarl.data.vocabulary import EVERY_TOKEN, Vocabulary
from megarl.errors import DataError
from megarl.types import Row, RowImage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.data.images import DataImages


class SftDataset:
    """A data set of chats as rows whose loss mask marks the tokens to imitate, mostly answers of the assistant.

    The prompt of a row is all before its first imitated token; its response goes on to the last one. A row over the
    length limit raises DataError; with `sft.on_long` it is left out (counted in `num_dropped`) or loses its end
    (counted in `num_cut`). `limits` names the limit in messages. answers: encodes answers; None: as the tokenizer alone
    says. vocabulary: DataError for a token without a row in the model's embedding. images: read those of the rows;
    None: rows are texts alone. `spelled`: rows whose texts spell special tokens.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        tokenizer: "PreTrainedTokenizerBase",
        *,
        max_prompt_tokens: int,
        max_response_tokens: int,
        settings: SftConfig | None = None,
        form: DataConfig | None = None,
        answers: Answers | None = None,
        vocabulary: Vocabulary = EVERY_TOKEN,
        images: "DataImages | None" = None,
    ) -> None:
        self._tokenizer, self._answers = tokenizer, answers or Answers(tokenizer)
        self._settings, self._form, self._images = settings or SftConfig(), form or DataConfig(), images
        require_system_turn(tokenizer, self._form.system_prompt)
        limits = _Limits(max_prompt_tokens, max_response_tokens, self._settings)
        self.limits = str(limits)
        self._tokens: list[array[int]] = []
        self._masks: list[bytes] = []
        # With images, of each row its number in the files, and those that it shows.
        self._shown = list[tuple[int, tuple[RowImage, ...]]]()
        self.num_dropped = self.num_cut = 0
        self.spelled = SpelledSpecialTokens(tokenizer)
        files = RowFiles(paths, columns=demonstration_columns(self._form, self._settings))
        self._files = files if images is not None else None
        for i, row in enumerate(files):
            where, record = files.where(i), self._parse(files, i, row)
            self.spelled.look(record.messages, where, whole=self._settings.train_on == "every_token")
            for ids, mask, shown in self._encoded(record, where):
                num_kept = limits.num_kept(len(ids), mask.index(True), where)
                # A cut may end within a turn that is not trained.
                num_kept = max((j + 1 for j in range(num_kept) if mask[j]), default=0)
                self.num_dropped += num_kept == 0
                self.num_cut += 0 < num_kept < len(ids)
                if num_kept:
                    vocabulary.require(ids[:num_kept], where)
                    self._tokens.append(array("i", ids[:num_kept]))
                    self._masks.append(bytes(mask[:num_kept]))
                    if images is not None:
                        self._shown.append((i, tuple(each for each in shown if each.places[-1] < num_kept)))
        if not self._tokens:
            raise DataError(f"all {self.num_dropped} rows are over {self.limits}; raise it")

    def _parse(self, files: RowFiles, i: int, row: Mapping[str, object]) -> DemonstrationRecord:
        images = None if self._images is None else self._images.of_row(files, i, row)
        return parse_demonstration(row, files.where(i), self._form, self._settings, images)

    def _encoded(
        self, record: DemonstrationRecord, where: str
    ) -> Iterator[tuple[list[int], list[bool], tuple[RowImage, ...]]]:
        """Yield the token ids, the loss mask and the images of each row that a chat becomes."""
        train_on, messages = self._settings.train_on, record.messages
        if train_on == "every_token":
            (text,) = render_chats(self._tokenizer, [messages], add_generation_prompt=False, places=[where])
            whole: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
            # Nothing predicts the first token.
            encoded = [(len(messages), whole, [False] + [True] * (len(whole) - 1))]
        else:
            turns = record.trained[-1:] if train_on == "last" else record.trained
            parts = [(i,) for i in turns] if train_on == "each" else [turns]
            encoded = [(part[-1] + 1, *self._answers.turns(messages, part, where=where)) for part in parts]
        for num_turns, ids, mask in encoded:
            if self._images is None:
                yield ids, mask, ()
            else:
                found = self._images.expand(ids, messages[:num_turns], where)
                # Nothing is trained to write an image.
                yield found.token_ids, [i >= 0 and mask[i] for i in found.origins], found.images

    def __len__(self) -> int:
        return len(self._tokens)

    def rows(self, indices: Sequence[int]) -> list[Row]:
        """Return the rows with these indices."""
        return [self[i] for i in indices]

    def __getitem__(self, index: int) -> Row:
        mask, images = np.frombuffer(self._masks[index], dtype=np.bool_), tuple[RowImage, ...]()
        if self._files is not None:
            place, images = self._shown[index]
            if images:
                # Images that are read are kept, if it is time.
                self._parse(self._files, place, self._files[place])
        num_prompt_tokens = int(mask.argmax())
        return Row(
            uid=f"sft:{index}",
            sample_index=0,
            token_ids=np.asarray(self._tokens[index], dtype=np.int32),
            num_prompt_tokens=num_prompt_tokens,
            loss_mask=mask[num_prompt_tokens:].copy(),
            images=images,
        )


class _Limits:
    """The limits of a row's length: of its prompt and its response, or of both together."""

    def __init__(self, max_prompt_tokens: int, max_response_tokens: int, settings: SftConfig) -> None:
        self._prompt, self._response, self._on_long = max_prompt_tokens, max_response_tokens, settings.on_long
        self._total, self._name = settings.max_tokens, "sft.max_tokens"
        if self._total is None and settings.train_on == "every_token":
            self._total = max_prompt_tokens + max_response_tokens
            self._name = "data.max_prompt_tokens + rollout.max_response_tokens"

    def __str__(self) -> str:
        if self._total is not None:
            return f"{self._name}={self._total}"
        return f"data.max_prompt_tokens={self._prompt} or rollout.max_response_tokens={self._response}"

    def num_kept(self, num_tokens: int, num_prompt_tokens: int, where: str) -> int:
        """Return how many of a row's first tokens are kept; DataError if it is too long and nothing may be left out."""
        long_prompt = self._total is None and num_prompt_tokens > self._prompt
        limit = num_prompt_tokens + self._response if self._total is None else self._total
        if num_tokens <= limit and not long_prompt:
            return num_tokens
        if self._on_long == "cut" and not long_prompt:
            return limit
        if self._on_long != "error":
            return 0
        if long_prompt:
            raise long_prompt_error(where, num_prompt_tokens, self._prompt, key="sft.on_long")
        got, name = (num_tokens, self._name) if self._total else (num_tokens - num_prompt_tokens, "")
        raise DataError(
            f"{where}: the {'row' if self._total else 'demonstration'} has {got} tokens, "
            f"{name or 'rollout.max_response_tokens'} is {self._total or self._response}; raise it, remove the row, or "
            "set sft.on_long=cut or drop"
        )
