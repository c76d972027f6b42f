"""Define `Row`, the form of a sample that the trainer's ranks get, and the per-token quantities that can be added to
it.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, TypeAlias

import numpy as np

from megarl.types.arrays import (
    BoolArray,
    ExpertArray,
    FloatArray,
    IdArray,
    LikelyTokens,
    NucleusArray,
    require_experts_of_tokens,
    require_labels_in_nucleus,
)
from megarl.types.forks import Fork, Indices, after_other_prompt, branches, path_to, require_forks
from megarl.types.images import RowImage, images_on, require_images
from megarl.types.samples import Sample

# The name of the quantity of chosen rows that says by how much they are to be preferred at least.
MARGIN = "margin"
# That of what environments said: 1 on tokens that are to be predicted, though they are no loss tokens.
OBSERVED = "observed"
# That of the lag of each token: by how many updates the weights that sampled it lag behind.
LAG = "lag"
# That of the advantages before CPO shaped them, which the record of a step shows.
BASE_ADVANTAGES = "cpo_base_advantages"


class TokenQuantity(StrEnum):
    """The names of quantities per token that a forward pass can compute before the update, such as log-probs."""

    OLD_LOGPROBS = "old_logprobs"
    OLD_ENTROPY = "old_entropy"
    # Σ p² of the distribution that a token was sampled from.
    OLD_SQUARES = "old_squares"
    REF_LOGPROBS = "ref_logprobs"
    TEACHER_LOGPROBS = "teacher_logprobs"
    TEACHER_ENTROPY = "teacher_entropy"
    # The teacher's log-probs with the hint of another prompt.
    TEACHER_BASELINE_LOGPROBS = "teacher_baseline_logprobs"
    HINT_LOGPROBS = "hint_logprobs"
    # Log-probs with the hint of another prompt.
    SHUFFLED_HINT_LOGPROBS = "shuffled_hint_logprobs"
    # KL(policy with the hint ‖ policy) over the whole vocabulary.
    HINT_KL = "hint_kl"
    VALUES = "values"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One sample (prompt and response) in the form that the trainer's ranks get; per-token arrays are [R], R the
    response length.

    `quantities` holds per-token results by name (`old_logprobs`, `ref_logprobs`, `rollout_logprobs`, `advantages`).
    `routed_experts` is that of `Sample`. nucleus: [R, K] int32, for each response token the ids that it was drawn from
    (top-k or top-p, itself included), padded with -1. A token drawn from the whole vocabulary, or not drawn at all, has
    only -1; None means this for all tokens. forks: those of `Sample`; a label is predicted on the path that leads to
    it. likely: what a teacher would have written, if one was asked, or the engine's head (see `Segment`).
    hinted_prompt: the prompt that a teacher reads instead of the row's own; None: it reads the same. labels: [R] int32,
    the tokens whose log-probs are computed at the places of the response's; None: these themselves. num_uncounted: how
    many of its first tokens do not count in the balance of experts, as they count in another row of the mini-batch.
    images: what its tokens show, in order.
    """

    uid: str
    sample_index: int
    token_ids: IdArray
    num_prompt_tokens: int
    loss_mask: BoolArray
    quantities: Mapping[str, FloatArray] = field(default_factory=dict)
    routed_experts: ExpertArray | None = None
    nucleus: NucleusArray | None = None
    forks: tuple[Fork, ...] = ()
    likely: LikelyTokens | None = None
    hinted_prompt: IdArray | None = None
    labels: IdArray | None = None
    num_uncounted: int = 0
    images: tuple[RowImage, ...] = ()

    def __post_init__(self) -> None:
        shape = (len(self.token_ids) - self.num_prompt_tokens,)
        if self.num_prompt_tokens < 1:
            raise ValueError(f"row {self.label}: needs at least one prompt token to predict the first label from")
        for name, value in (("loss_mask", self.loss_mask), ("labels", self.label_ids), *self.quantities.items()):
            if value.shape != shape:
                raise ValueError(f"row {self.label}: {name} has shape {value.shape}, expected {shape}")
        if self.routed_experts is not None:
            require_experts_of_tokens(self.routed_experts, len(self.token_ids), f"row {self.label}")
        if self.nucleus is not None:
            require_labels_in_nucleus(self.nucleus, self.label_ids, f"row {self.label}")
        if self.images:
            require_images(self.images, self.num_tokens, f"row {self.label}")
        if self.forks:
            first, whose = self.num_prompt_tokens, f"row {self.label}"
            require_forks(self.forks, num_given=first, num_tokens=self.num_tokens, whose=whose)
            if any(fork.after < 0 and self.predicted[fork.start - first] for fork in self.forks):
                raise ValueError(f"{whose}: its loss mask has the first token of a path, which nothing predicts")

    @property
    def label(self) -> str:
        """Return a name of this row for log and error messages."""
        return f"{self.uid}/{self.sample_index}"

    @property
    def label_ids(self) -> IdArray:
        """Return the tokens [R] whose log-probs are computed."""
        return self.token_ids[self.num_prompt_tokens :] if self.labels is None else self.labels

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_response_tokens(self) -> int:
        return len(self.loss_mask)

    @property
    def num_loss_tokens(self) -> int:
        return int(np.count_nonzero(self.loss_mask))

    @property
    def predicted(self) -> BoolArray:
        """Return where log-probs are computed: at loss tokens, and at what environments said if the row has that."""
        observed = self.quantities.get(OBSERVED)
        return self.loss_mask if observed is None else self.loss_mask | (observed > 0)

    def with_quantities(self, **quantities: FloatArray) -> "Row":
        """Return the row with these quantities added; a quantity that exists under the same name is replaced."""
        return self._copy(
            {**self.quantities, **quantities}, self.routed_experts, self.nucleus, self.likely, self.hinted_prompt
        )

    def with_hinted_prompt(self, prompt: IdArray) -> "Row":
        """Return the row with the prompt that its teacher reads."""
        return self._copy(self.quantities, self.routed_experts, self.nucleus, self.likely, prompt)

    def only(
        self,
        names: Collection[str],
        *,
        routed_experts: bool = False,
        nucleus: bool = False,
        likely: bool = False,
        hinted_prompt: bool = False,
    ) -> "Row":
        """Return a copy of the row without its quantities (per-token values such as log-probs), except those in
        `names`.

        The recorded experts, the nucleus (the tokens that top-p and top-k left), the teacher's likeliest tokens and its
        prompt are also dropped, unless asked for. Everything else is kept.
        """
        return self._copy(
            {name: values for name, values in self.quantities.items() if name in names},
            self.routed_experts if routed_experts else None,
            self.nucleus if nucleus else None,
            self.likely if likely else None,
            self.hinted_prompt if hinted_prompt else None,
        )

    def after_prompt(self, prompt: IdArray) -> "Row":
        """Return the same response after another prompt, without quantities, labels and what else belongs to tokens.

        Branches of a conversation that does not go on from its whole prompt do not read the other one.
        """
        if self.images:
            raise ValueError(f"row {self.label}: shows images, and another prompt would have none of them")
        return Row(
            uid=self.uid,
            sample_index=self.sample_index,
            token_ids=np.concatenate([prompt, self.token_ids[self.num_prompt_tokens :]]),
            num_prompt_tokens=len(prompt),
            loss_mask=self.loss_mask,
            forks=after_other_prompt(self.forks, self.token_ids[: self.num_prompt_tokens], prompt),
        )

    @property
    def as_taught(self) -> "Row":
        """Return the row as its teacher reads it."""
        return self if self.hinted_prompt is None else self.after_prompt(self.hinted_prompt)

    def _copy(
        self,
        quantities: Mapping[str, FloatArray],
        experts: ExpertArray | None,
        nucleus: NucleusArray | None,
        likely: LikelyTokens | None,
        hinted_prompt: IdArray | None,
    ) -> "Row":
        """Return the row with these, as `dataclasses.replace` would in three times the time."""
        return Row(
            uid=self.uid,
            sample_index=self.sample_index,
            token_ids=self.token_ids,
            num_prompt_tokens=self.num_prompt_tokens,
            loss_mask=self.loss_mask,
            quantities=quantities,
            routed_experts=experts,
            nucleus=nucleus,
            forks=self.forks,
            likely=likely,
            hinted_prompt=hinted_prompt,
            labels=self.labels,
            num_uncounted=self.num_uncounted,
            images=self.images,
        )


def lags_of(rows: Sequence[Row]) -> tuple[int, ...]:
    """List the lags above 0 that loss tokens of rows have, in ascending order.

    >>> lags_of([])
    ()
    """
    stale = [row.quantities[LAG][row.loss_mask] for row in rows if LAG in row.quantities]
    return tuple(sorted({int(lag) for lags in stale for lag in np.unique(lags)} - {0}))


class RowPath(NamedTuple):
    """One path of a row that forks, as a row of its own whose labels are those of its last branch; of quantities it has
    `observed` alone.

    owner: the number of the row that it is a path of. columns: the place of each of its response tokens in that row's
    response; those in the prompt have negative ones.
    """

    row: Row
    owner: int
    columns: Indices


def paths_of(rows: Sequence[Row]) -> list[RowPath]:
    """Return the paths of rows: each label is in one of them, after the tokens that stood before it.

    A row without forks is its own path. Branches without labels have a path only as the beginning of others.

    >>> row = row_read_at_end("a", 0, np.array([5, 6]))
    >>> [path.row.token_ids.tolist() for path in paths_of([row])]
    [[5, 6, 6]]
    """
    return [path for owner, row in enumerate(rows) for path in _paths_of(row, owner)]


def _paths_of(row: Row, owner: int) -> Iterator[RowPath]:
    if not row.forks:
        yield RowPath(row=row, owner=owner, columns=np.arange(row.num_response_tokens))
        return
    given, predicted, observed = row.num_prompt_tokens, row.predicted, row.quantities.get(OBSERVED)
    bounds = branches(row.num_tokens, row.forks)
    labelled = [(start, end) for start, end in bounds if predicted[max(start - given, 0) : end - given].any()]
    # In the balance of experts a token counts in the first path that has it.
    counts = np.arange(row.num_tokens) >= row.num_uncounted
    for start, end in labelled or bounds[:1]:
        path = path_to(end, row.forks)
        num_uncounted = int(np.count_nonzero(~counts[path]))
        counts[path] = False
        num_prompt = max(1, int(np.count_nonzero(path < given)))
        columns = path[num_prompt:] - given
        own = path[num_prompt:] >= start
        yield RowPath(
            row=Row(
                uid=row.uid,
                sample_index=row.sample_index,
                token_ids=row.token_ids[path],
                num_prompt_tokens=num_prompt,
                loss_mask=row.loss_mask[columns] & own,
                quantities={} if observed is None else {OBSERVED: observed[columns] * own},
                routed_experts=None if row.routed_experts is None else row.routed_experts[path],
                nucleus=None if row.nucleus is None else row.nucleus[columns],
                likely=None if row.likely is None else row.likely.at(columns),
                labels=None if row.labels is None else row.labels[columns],
                num_uncounted=num_uncounted,
                images=images_on(row.images, path),
            ),
            owner=owner,
            columns=columns,
        )


# Rows by their index in a batch: a sequence of all of them, or a mapping of those that one process needs.
Rows: TypeAlias = Sequence[Row] | Mapping[int, Row]


def row_from_sample(sample: Sample) -> Row:
    """Make the row of a sample; all tokens after its prompt segment are the response.

    >>> from megarl.types import FinishReason, prompt_segment
    >>> prompt = prompt_segment([5, 6])
    >>> sample = Sample(uid="a", sample_index=0, seed=0, segments=(prompt,), finish_reason=FinishReason.STOP)
    >>> row_from_sample(sample).num_prompt_tokens
    2
    """
    return Row(
        uid=sample.uid,
        sample_index=sample.sample_index,
        token_ids=sample.token_ids,
        num_prompt_tokens=len(sample.prompt_token_ids),
        loss_mask=sample.loss_mask,
        quantities={"rollout_logprobs": sample.rollout_logprobs},
        routed_experts=sample.routed_experts,
        nucleus=sample.nucleus,
        likely=sample.head,
        forks=sample.forks,
        images=sample.images,
    )


def row_read_at_end(uid: str, sample_index: int, token_ids: IdArray, **quantities: float) -> Row:
    """Make a row of a whole sequence, such that a scalar head's score at its last token becomes the row's only output.

    Heads compute the output of a response token from the token before it. The response is therefore a single token
    after the sequence; its id does not affect the score.

    >>> row_read_at_end("a", 0, np.array([5, 6]), margin=0.5).token_ids.tolist()
    [5, 6, 6]
    """
    return Row(
        uid=uid,
        sample_index=sample_index,
        token_ids=np.append(token_ids, token_ids[-1:]),
        num_prompt_tokens=len(token_ids),
        loss_mask=np.ones(1, dtype=np.bool_),
        quantities={name: np.full(1, value, dtype=np.float32) for name, value in quantities.items()},
    )
