"""Sample the recorded rollouts of a run again, and check that tokens and log-probs are equal to the bit."""

import asyncio
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megarl.errors import DataError
from megarl.host import loop
from megarl.rollout.engine import Completion, GenerationRequest
from megarl.rollout.replay import ReplaySource, read_record, record_path
from megarl.rollout.source import Group, RolloutSource, SamplingPlan
from megarl.rollout.vllm_source import Engines
from megarl.types import Sample, Segment, SegmentSource
from megarl.types.forks import path_before
from megarl.types.images import RowImage, images_on
from megarl.types.seeds import try_seed
from megarl.types.turns import try_of


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """The tokens [start, end) of a sample's segment that one request sampled from one version of the weights.

    before: the tokens of prompt and response before the span, which show `images`. num_before: those that engines had
    sampled for the sample when its request began, and those of its request before the span. seed: that of its turn.
    """

    path: Path
    sample: Sample
    segment: Segment
    start: int
    end: int
    before: tuple[int, ...]
    images: tuple[RowImage, ...]
    num_before: int
    seed: int

    def request(self, plan: SamplingPlan) -> GenerationRequest:
        """Return the request whose completion is this span."""
        return GenerationRequest(
            token_ids=self.before,
            seed=self.seed,
            sampling=plan.sampling_of(self.sample.sample_index),
            max_tokens=self.end - self.start,
            num_before=self.num_before,
            with_nucleus=plan.with_nucleus,
            head_tokens=plan.head_tokens,
            images=self.images,
            whose=f"{self.path}: sample {self.sample.uid}/{self.sample.sample_index}",
        )

    def compare(self, completion: Completion) -> None:
        """Raise DataError unless a completion has the recorded tokens and log-probs, also those of the head."""
        tokens, logprobs = self.segment.token_ids[self.start : self.end], self.segment.rollout_logprobs
        assert logprobs is not None, "an engine sampled the span"
        recorded = logprobs[self.start : self.end]
        n = min(len(tokens), len(completion.token_ids))
        differ = (tokens[:n] != completion.token_ids[:n]) | (recorded[:n] != completion.logprobs[:n])
        if self.segment.head is not None and completion.head is not None:
            then_likely, now_likely = self.segment.head.at(slice(self.start, self.end)), completion.head
            differ |= (then_likely.ids[:n] != now_likely.ids[:n]).any(1)
            differ |= (then_likely.logprobs[:n] != now_likely.logprobs[:n]).any(1)
        if len(completion.token_ids) == len(tokens) and not differ.any():
            return
        place = int(np.argmax(differ)) if differ.any() else n
        now = "nothing"
        if place < len(completion.token_ids):
            now = f"token {completion.token_ids[place]} with log-prob {completion.logprobs[place]:.9g}"
        then = f"{tokens[place]} with {recorded[place]:.9g}" if place < len(tokens) else "the end of the span"
        version = self.segment.weight_versions[self.start]
        raise DataError(
            f"{self.path}: sample {self.sample.uid}/{self.sample.sample_index} is sampled differently now: generated "
            f"token {self.num_before + place}, by version {version}, is {now}, and was {then}; regenerate "
            "with the code, libraries, settings and kind of machine of the recorded run"
        )


def spans_of(path: Path, sample: Sample) -> Iterator[_Span]:
    """Yield the spans of a recorded sample: one for each request, and one more after each update during a request."""
    token_ids, shown, num_read, num_sampled = sample.token_ids, sample.images, len(sample.prompt_token_ids), 0
    tries = () if sample.episode is None else sample.episode.tries
    # Those of the turn under way, and those when the first of the tries began that were written beside it.
    num_own, num_before_tries, turn = 0, 0, 0
    for segment in sample.segments[1:]:
        if segment.source is SegmentSource.ENVIRONMENT:
            turn, num_own = turn + 1, 0
            if not try_of(turn, tries):
                num_before_tries = num_sampled
        if segment.source is SegmentSource.POLICY:
            updates = (np.flatnonzero(np.diff(segment.weight_versions)) + 1).tolist()
            bounds = [0, *updates, len(segment.token_ids)]
            path_of = path_before(num_read, sample.forks)
            before, images = token_ids[path_of].tolist(), images_on(shown, path_of)
            for start, end in itertools.pairwise(bounds):
                yield _Span(
                    path=path,
                    sample=sample,
                    segment=segment,
                    start=start,
                    end=end,
                    before=(*before, *segment.token_ids[:start].tolist()),
                    images=images,
                    num_before=num_before_tries + num_own + start,
                    seed=try_seed(sample.seed, try_of(turn, tries)),
                )
            num_own += len(segment.token_ids)
            num_sampled += len(segment.token_ids)
        num_read += len(segment.token_ids)


@dataclass(slots=True, kw_only=True)
class RegenerateSource(RolloutSource):
    """A rollout source that answers with recorded samples, as `ReplaySource` does, and samples each of them again.

    A sample that unfinished at an update went on with the new weights has spans of several versions. The spans of a
    version are sampled while the engines have it, in whichever step the sample trains; a difference in tokens or
    log-probs is a DataError that names the first sample, token and version.

    engines: have version `plan.step` − 1 of the weights when a step's samples are asked for. max_lag: the bound on the
    lag of the recorded run's tokens.
    """

    directory: Path
    engines: Engines
    max_lag: int
    # By version: the spans that are still to be sampled.
    _spans: dict[int, list[_Span]] = field(default_factory=dict)
    _num_read: int = 0
    # By step: the task that samples all spans of the version with which the step begins.
    _checks: "dict[int, asyncio.Task[None]]" = field(default_factory=dict)
    _replay: ReplaySource = field(init=False)

    def __post_init__(self) -> None:
        self._replay = ReplaySource(self.directory)

    async def sample(self, group: Group) -> None:
        """Wait until all spans of the version are sampled and compared, and finish the group's recorded samples."""
        step = group.plan.step
        if step not in self._checks:
            self._checks = {step: loop.spawn(self._check(group.plan))}
        await asyncio.wait({self._checks[step]})
        await self._replay.sample(group)

    async def _check(self, plan: SamplingPlan) -> None:
        # A resumed run regenerates what its own steps train on.
        for step in range(max(self._num_read + 1, plan.step), plan.step + self.max_lag + 1):
            if (path := record_path(self.directory, step)).is_file():
                for span in (span for sample in read_record(path).samples for span in spans_of(path, sample)):
                    self._spans.setdefault(int(span.segment.weight_versions[span.start]), []).append(span)
            self._num_read = step
        spans = self._spans.pop(plan.step - 1, [])
        for span, completion in [(span, self.engines.generate(span.request(plan))) for span in spans]:
            span.compare(await completion)
