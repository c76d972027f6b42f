"""Provide data sets of preference pairs, which are tokenised and checked when they are opened."""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from megarl.config.schema import DataConfig
from megarl.data.answers import Answers
from megarl.data.chat import encode_chats, long_prompt_error, require_system_turn
from megarl.data.files import READ_ROWS, RowFiles
from megarl.data.records import PREFERENCE_SIDES, PreferenceRecord, parse_preference, preference_columns
from megarl.data.special_tokens import SpelledSpecialTokens
from megarl.data.vocabulary import EVERY_TOKEN, Vocabulary
from megarl.errors import DataError
from megarl.types import Row, RowImage, row_read_at_end
from megarl.types.rows import MARGIN

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.data.images import DataImages

# A pair with a text over its length limit: the run does not start, or the pair is left out.
OnLong: TypeAlias = Literal["error", "drop"]


class PreferenceDataset:
    """A data set of preference pairs. Each side of a pair is a whole chat, rendered with the chat template.

    A chat of more than `max_tokens` tokens raises DataError or, with `on_long="drop"`, has its pair left out, which
    `num_dropped` counts. A malformed row raises DataError, as does a token without a row in the model's embedding
    (`vocabulary`). `spelled`: rows whose texts spell special tokens.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        tokenizer: "PreTrainedTokenizerBase",
        *,
        max_tokens: int,
        on_long: OnLong,
        form: DataConfig | None = None,
        vocabulary: Vocabulary = EVERY_TOKEN,
    ) -> None:
        self._sides: dict[str, list[array[int]]] = {side: [] for side in PREFERENCE_SIDES}
        self._margins = array("d")
        self.num_dropped = 0
        self.spelled = SpelledSpecialTokens(tokenizer)
        form = form or DataConfig()
        files = _open(paths, tokenizer, form)
        for chunk in _chunks(files, form):
            places = [files.where(i) for i, _ in chunk]
            encoded = [
                encode_chats(
                    tokenizer,
                    [getattr(record, side) for _, record in chunk],
                    add_generation_prompt=False,
                    places=[f"{where}: {side}" for where in places],
                )
                for side in PREFERENCE_SIDES
            ]
            for (_, record), where, *chats in zip(chunk, places, *encoded, strict=True):
                self.spelled.look(record.chosen, where, rejected=record.rejected, whole=True)
                longest, side = max((len(ids), side) for ids, side in zip(chats, PREFERENCE_SIDES, strict=True))
                if longest > max_tokens:
                    if on_long == "error":
                        raise DataError(
                            f"{where}: {side}: the conversation has {longest} tokens, data.max_prompt_tokens + "
                            f"rollout.max_response_tokens is {max_tokens}; raise one of them, remove the row, or set "
                            "train_reward.on_long=drop"
                        )
                    self.num_dropped += 1
                    continue
                self._margins.append(record.margin)
                for side, ids in zip(PREFERENCE_SIDES, chats, strict=True):
                    vocabulary.require(ids, f"{where}: {side}")
                    self._sides[side].append(array("i", ids))
        if not self._margins:
            raise DataError(
                f"all {self.num_dropped} pairs have a conversation of more than {max_tokens} tokens, "
                "data.max_prompt_tokens + rollout.max_response_tokens; raise one of them"
            )

    def __len__(self) -> int:
        return len(self._margins)

    def rows(self, indices: Sequence[int]) -> list[Row]:
        """Return the chosen chats of the pairs with these indices, then the rejected ones in the same order."""
        return [
            row_read_at_end(
                f"pair:{i}",
                number,
                np.asarray(tokens[i], dtype=np.int32),
                **{MARGIN: self._margins[i] if side == "chosen" else 0.0},
            )
            for number, (side, tokens) in enumerate(self._sides.items())
            for i in indices
        ]


class ResponsePairDataset:
    """A data set of preference pairs. Each pair is a prompt and two responses as the policy would have written them.

    A prompt or a response over its limit raises DataError or, with `on_long="drop"`, has its pair left out, which
    `num_dropped` counts. A malformed row raises DataError. answers: encodes responses; None: as the tokenizer alone
    says. vocabulary: DataError for a token without a row in the model's embedding. images: read those that prompts
    show; None: rows are texts alone. `spelled`: rows whose texts spell special tokens.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        tokenizer: "PreTrainedTokenizerBase",
        *,
        max_prompt_tokens: int,
        max_response_tokens: int,
        on_long: OnLong,
        form: DataConfig | None = None,
        answers: Answers | None = None,
        vocabulary: Vocabulary = EVERY_TOKEN,
        images: "DataImages | None" = None,
    ) -> None:
        answers, self._images, self._form = answers or Answers(tokenizer), images, form or DataConfig()
        # With images: the rows' numbers in the files, and what their prompts show.
        self._shown: list[tuple[int, tuple[RowImage, ...]]] = []
        self._prompts: list[array[int]] = []
        self._sides: dict[str, list[array[int]]] = {side: [] for side in PREFERENCE_SIDES}
        self.num_dropped = 0
        self.spelled, self._files = SpelledSpecialTokens(tokenizer), _open(paths, tokenizer, self._form)
        for chunk in _chunks(self._files, self._form, images):
            places = [self._files.where(i) for i, _ in chunk]
            prompts = encode_chats(tokenizer, [record.chosen[:-1] for _, record in chunk], places=places)
            for (number, record), where, prompt in zip(chunk, places, prompts, strict=True):
                self.spelled.look(record.chosen, where, rejected=record.rejected)
                shown = tuple[RowImage, ...]()
                if images is not None:
                    prompt, _, shown = images.expand(prompt, record.chosen[:-1], where)
                responses = {}
                for side in PREFERENCE_SIDES:
                    *question, answer = getattr(record, side)
                    responses[side] = answers.demonstration(question, answer.content, where=f"{where}: {side}")
                longest, side = max((len(ids), side) for side, ids in responses.items())
                if len(prompt) > max_prompt_tokens or longest > max_response_tokens:
                    if on_long == "drop":
                        self.num_dropped += 1
                        continue
                    if len(prompt) > max_prompt_tokens:
                        raise long_prompt_error(where, len(prompt), max_prompt_tokens, key="train_preference.on_long")
                    raise DataError(
                        f"{where}: {side}: the response has {longest} tokens, rollout.max_response_tokens is "
                        f"{max_response_tokens}; raise it, remove the row, or set train_preference.on_long=drop"
                    )
                vocabulary.require(prompt, where)
                self._prompts.append(array("i", prompt))
                self._shown += [] if images is None else [(number, shown)]
                for side, ids in responses.items():
                    vocabulary.require(ids, f"{where}: {side}")
                    self._sides[side].append(array("i", ids))
        if not self._prompts:
            raise DataError(
                f"all {self.num_dropped} pairs are over data.max_prompt_tokens={max_prompt_tokens} or "
                f"rollout.max_response_tokens={max_response_tokens}; raise one of them"
            )

    def __len__(self) -> int:
        return len(self._prompts)

    def rows(self, indices: Sequence[int]) -> list[Row]:
        """Return the chosen responses of the pairs with these indices, then the rejected ones in the same order."""
        for i in indices if self._images is not None else ():
            # An image is kept when its pair is drawn.
            number = self._shown[i][0]
            _parse(self._files, number, self._files[number], self._form, self._images)
        return [
            Row(
                uid=f"pair:{i}",
                sample_index=number,
                token_ids=np.array([*self._prompts[i], *responses[i]], dtype=np.int32),
                num_prompt_tokens=len(self._prompts[i]),
                loss_mask=np.ones(len(responses[i]), dtype=np.bool_),
                images=self._shown[i][1] if self._shown else (),
            )
            for number, responses in enumerate(self._sides.values())
            for i in indices
        ]


def mismatched_rows(rows: Sequence[Row]) -> list[Row]:
    """Return each row's prompt with the next row's response, the last row's with the first's, for estimates of a KL."""
    return [
        Row(
            uid=row.uid,
            sample_index=row.sample_index,
            token_ids=np.append(row.token_ids[: row.num_prompt_tokens], other.token_ids[other.num_prompt_tokens :]),
            num_prompt_tokens=row.num_prompt_tokens,
            loss_mask=other.loss_mask,
            images=row.images,
        )
        for row, other in zip(rows, [*rows[1:], *rows[:1]], strict=True)
    ]


def _open(paths: Sequence[str | Path], tokenizer: "PreTrainedTokenizerBase", form: DataConfig) -> RowFiles:
    require_system_turn(tokenizer, form.system_prompt)
    return RowFiles(paths, columns=preference_columns(form), required=PREFERENCE_SIDES)


def _parse(
    files: RowFiles, number: int, row: Mapping[str, object], form: DataConfig, images: "DataImages | None"
) -> PreferenceRecord:
    shown = None if images is None else images.of_row(files, number, row)
    return parse_preference(row, files.where(number), form, shown)


def _chunks(
    files: RowFiles, form: DataConfig, images: "DataImages | None" = None
) -> Iterator[list[tuple[int, PreferenceRecord]]]:
    """Read and check rows, and yield them with their numbers, some at a time."""
    rows = ((number, _parse(files, number, row, form, images)) for number, row in enumerate(files))
    while chunk := list(islice(rows, READ_ROWS)):
        yield chunk
