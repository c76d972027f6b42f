"""Provide data sets of prompts (`Prompt`), which are tokenised once, on opening.

Every row is read and checked at that time, so that a bad row stops a run before training. Token ids are kept in
arrays of 4 bytes per token instead of lists of Python objects.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from megarl.config.algo import CpoConfig, DemonstrationConfig
from megarl.config.environments import EnvironmentConfig
from megarl.config.schema import DataConfig
from megarl.data.answers import Answers
from megarl.data.chat import encode_chats, long_prompt_error, require_system_turn
from megarl.data.files import READ_ROWS, RowFiles
from megarl.data.messages import read_answer
from megarl.data.records import (
    NAME_COLUMNS,
    TARGET_PROBS,
    PromptRecord,
    parse_prompt,
    parse_target_probs,
    prompt_columns,
    required_columns,
)
from megarl.data.roles import require_words
from megarl.data.special_tokens import SpelledSpecialTokens
from megarl.data.vocabulary import EVERY_TOKEN, Vocabulary
from megarl.errors import ConfigError, DataError
from megarl.types import Message, Prompt, RowImage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.data.images import DataImages, RowsImages

# Marks a token for which the demonstrator's probability is unknown.
UNKNOWN_PROB = -1.0

ToolsOf: TypeAlias = Callable[[str], Sequence[Mapping[str, object]]]


def no_tools(_: str) -> Sequence[Mapping[str, object]]:
    """Return no schemas."""
    return ()


def read_prompt(
    row: Mapping[str, object],
    where: str,
    form: DataConfig,
    environment: EnvironmentConfig,
    images: "RowsImages | None" = None,
) -> tuple[PromptRecord, str]:
    """Parse a row, and return also its environment; DataError if it has no question and no environment that writes
    one.
    """
    record, name = parse_prompt(row, where, form, images), environment_of(row, where, environment)
    if not name:
        if record.extra_info.get("need_tools_kwargs"):
            raise DataError(f"{where}: extra_info: need_tools_kwargs asks for tools; set environment.default to theirs")
        require_words(record.messages, where)
    return record, name


def environment_of(row: Mapping[str, object], where: str, environment: EnvironmentConfig) -> str:
    """Return the name of a row's environment; empty: it has none."""
    name = row.get(environment.key) or environment.default or ""
    if not isinstance(name, str):
        raise DataError(f"{where}: {environment.key} is {name!r}, expected the name of an environment")
    return name


class PromptDataset:
    """A data set of prompts. A prompt's uid is its data source and its row number, counted before rows are dropped.

    settings: names the columns and limits the length of prompts. A longer one raises DataError; with
    `on_long_prompt="drop"` it is left out and counted in `num_dropped`. With `demonstrations`, prompts carry the
    demonstrations of the files; DataError if no file has any. `num_target_probs` counts the prompts whose demonstration
    comes with the demonstrator's probabilities. environment: names the column with a row's environment, or one for all
    rows. tools_of: returns the schemas of an environment's tools, which the chat template writes into the prompts.
    answers: encodes demonstrations; None: as the tokenizer alone says. vocabulary: DataError for tokens of prompts and
    demonstrations without a row in the model's embedding. cpo: prompts carry the texts of which hints are made; a field
    that it names and `extra_info` lacks is the column of that name.
    images: read those of the rows; None: rows are texts alone.
    `spelled`: rows whose texts spell special tokens. `by_roles`: of each sequence of roles that prompts have, the first
    prompt.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        tokenizer: "PreTrainedTokenizerBase",
        settings: DataConfig,
        *,
        demonstrations: DemonstrationConfig | None = None,
        environment: EnvironmentConfig | None = None,
        tools_of: ToolsOf = no_tools,
        answers: Answers | None = None,
        vocabulary: Vocabulary = EVERY_TOKEN,
        cpo: CpoConfig | None = None,
        images: "DataImages | None" = None,
    ) -> None:
        self._with_targets = cpo is not None and cpo.hint.source == "demonstration"
        self._fields = [name for name in (cpo.hint.field, cpo.difficulty_field) if name] if cpo else []
        self._settings, self._environment, self.images = settings, environment or EnvironmentConfig(), images
        columns = [*prompt_columns(settings), self._environment.key, *self._fields]
        if demonstrations or self._with_targets:
            columns += [settings.target_key, TARGET_PROBS]
        self._files = RowFiles(paths, columns=columns, required=required_columns(settings), remedy=NAME_COLUMNS)
        require_system_turn(tokenizer, settings.system_prompt)
        self._tokens: list[array[int]] = []
        # One entry per prompt, if demonstrations are requested; a prompt without a target has an empty one.
        self._demonstrations: list[array[int]] = []
        self._kept, self.num_target_probs = array("q"), 0
        self.by_roles, self.spelled = dict[tuple[str, ...], int](), SpelledSpecialTokens(tokenizer)
        self._indexed, self._shown = dict[int, str](), dict[int, tuple[RowImage, ...]]()
        encoder = None if demonstrations is None else answers or Answers(tokenizer)
        sources, environments = set[str](), set[str]()
        rows = (self._checked(i, row) for i, row in enumerate(self._files))
        while chunk := list(islice(rows, READ_ROWS)):
            sources.update([record.data_source for *_, record, _ in chunk])
            environments.update([name for *_, name in chunk if name])
            prompts = list[list[int]]()
            for name, group in groupby(chunk, key=lambda each: each[-1]):
                part = list(group)
                places, chats = [where for _, where, *_ in part], [record.messages for *_, record, _ in part]
                tools = self._tools(tools_of, name, places[0]) if name else ()
                prompts += encode_chats(tokenizer, chats, prefill=True, tools=tools, places=places)
            for (index, where, row, record, _), written in zip(chunk, prompts, strict=True):
                ids = self._with_images(written, record, index)
                if len(ids) <= settings.max_prompt_tokens:
                    vocabulary.require(ids, where)
                    self.spelled.look((*record.messages, *(self._target(row, where) if demonstrations else ())), where)
                    self.by_roles.setdefault(tuple([message.role for message in record.messages]), len(self._kept))
                    self._tokens.append(array("i", ids))
                    self._kept.append(index)
                    if demonstrations is not None and encoder is not None:
                        target, has_probs = self._demonstration(encoder, row, record, demonstrations, where)
                        vocabulary.require(target, f"{where}: {settings.target_key}")
                        self._demonstrations.append(array("i", target))
                        self.num_target_probs += has_probs
                elif settings.on_long_prompt == "error":
                    raise long_prompt_error(where, len(ids), settings.max_prompt_tokens)
        self.data_sources, self.environments = frozenset(sources), frozenset(environments)
        self.num_dropped = len(self._files) - len(self._kept)
        # Number of usable prompts of each file, in the order of `paths`.
        self.num_prompts_by_file = self._files.counts(self._kept)
        self._require_usable(demonstrations)

    def _with_images(self, ids: list[int], record: PromptRecord, index: int) -> list[int]:
        """Return a prompt's tokens with those of its images, and note these."""
        if self.images is None:
            return ids
        expanded = self.images.expand(ids, record.messages, self._files.where(index))
        if expanded.images:
            self._shown[index] = expanded.images
        return expanded.token_ids

    def _tools(self, tools_of: ToolsOf, name: str, where: str) -> Sequence[Mapping[str, object]]:
        try:
            return tools_of(name)
        except ConfigError as error:
            named_here = name != self._environment.default
            raise ConfigError(f"{where}: {error}" if named_here else str(error)) from error

    def _target(self, row: Mapping[str, object], where: str) -> tuple[Message, ...]:
        """Return a row's answer, as a turn; without one there is none."""
        key = self._settings.target_key
        return (read_answer(row, key, where),) if row.get(key) else ()

    def _demonstration(
        self, answers: Answers, row: Mapping[str, object], record: PromptRecord, cfg: DemonstrationConfig, where: str
    ) -> tuple[list[int], bool]:
        """Encode a row's target as the policy would have written it; also return whether the row has `target_probs`.

        A target of more than `cfg.max_tokens` tokens besides its end token is cut and has no end token, or is not used
        at all (`cfg.on_long`). For a row without a target, no tokens are returned. DataError names the row (`where`).
        """
        target = self._target(row, where)
        if not target:
            return [], False
        ids = answers.demonstration(record.messages, target[0].content, where=where)
        probs = parse_target_probs(row, where)
        # There must be one probability per token of the target, and there may be one more for the end token.
        if probs and len(probs) not in (len(ids) - 1, len(ids)):
            raise DataError(
                f"{where}: target_probs has {len(probs)} entries, expected {len(ids) - 1}, one per token of the "
                f"target, or {len(ids)} with the end token; compute them with this model's tokenizer"
            )
        if len(ids) > cfg.max_tokens + 1:
            ids = ids[: cfg.max_tokens] if cfg.on_long == "cut" else []
        return ids, bool(probs)

    def _require_usable(self, demonstrations: DemonstrationConfig | None) -> None:
        """Raise DataError if no prompt is left, or no demonstration where they are requested."""
        if not self._kept:
            raise DataError(
                f"all {self.num_dropped} prompts have more tokens than data.max_prompt_tokens="
                f"{self._settings.max_prompt_tokens}; raise it"
            )
        if demonstrations is not None and not any(self._demonstrations):
            raise DataError(
                f"none of the {len(self)} prompts has a usable target, but algo.demonstrations.strategy asks for "
                f"demonstrations; add the column {self._settings.target_key}, raise algo.demonstrations.max_tokens, or "
                "set strategy=none"
            )

    def _checked(
        self, index: int, row: Mapping[str, object]
    ) -> tuple[int, str, Mapping[str, object], PromptRecord, str]:
        """Parse a row, and return it with its place and its environment."""
        where = self._files.where(index)
        images = None if self.images is None else self.images.of_row(self._files, index, row)
        record, environment = read_prompt(row, where, self._settings, self._environment, images)
        if record.indexed:
            self._indexed[index] = record.indexed
        return index, where, row, record, environment

    def __len__(self) -> int:
        return len(self._kept)

    def where(self, index: int) -> str:
        """Return the file and the row of a prompt, for messages."""
        return self._files.where(self._kept[index])

    def indexed(self, index: int) -> str:
        """Return the column of choices of which a prompt's truth may be an index; empty: there is none."""
        return self._indexed.get(self._kept[index], "")

    def __getitem__(self, index: int) -> Prompt:
        place = self._kept[index]
        _, where, row, record, environment = self._checked(place, self._files[place])
        demonstration = self._demonstrations[index] if self._demonstrations else ()
        probs = parse_target_probs(row, where) if self._demonstrations else ()
        fields = {name: row[name] for name in self._fields if row.get(name) is not None}
        target = self._target(row, where) if self._with_targets else ()
        return Prompt(
            uid=f"{record.data_source}:{place}",
            token_ids=tuple(self._tokens[index]),
            data_source=record.data_source,
            ground_truth=record.ground_truth,
            extra_info={**fields, **record.extra_info} if fields else record.extra_info,
            messages=record.messages,
            demonstration_ids=tuple(demonstration),
            demonstration_probs=(*probs, UNKNOWN_PROB)[: len(demonstration)] if probs else (),
            target=target[0].content if target else "",
            environment=environment,
            label=None if isinstance(record.label, str) else record.label,
            is_text=[row.get(self._settings.prompt_key)] == [message.content for message in record.messages],
            images=self._shown.get(place, ()),
        )
