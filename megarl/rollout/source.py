"""Define the interface between the trainer and whatever produces samples."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np

from megarl.config.generation import Sampling
from megarl.errors import NonFiniteError
from megarl.host import loop
from megarl.host.signals import last_stop_signal
from megarl.types import Prompt, RolloutBatch, Sample

if TYPE_CHECKING:
    from megarl.rewards.manager import Judging
    from megarl.rollout.engine import Completion

# Between two looks for a signal while something waits for samples.
LOOK_S = 1.0

# Says in messages what a wait is for.
Doing: TypeAlias = Callable[[], str]


class SamplingStopped(Exception):  # noqa: N818 - a signal asked for it
    """A signal asked for a stop during a wait for samples; all that is in the pipeline is as before the wait."""


def generating() -> str:
    """Describe a wait for samples of which nothing more is known."""
    return "generating"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """The given first tokens of a response. If `is_complete`, they are the whole response, and nothing is generated."""

    token_ids: tuple[int, ...] = ()
    is_complete: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingPlan:
    """How the samples of prompts are made.

    prefixes: the given first tokens of responses, by (uid, sample index). last_is_greedy: whether the last sample of
    each prompt is greedy, whatever `sampling` says. with_nucleus: record the tokens that top_k and top_p left to sample
    each token from. head_tokens: as in `GenerationRequest`. may_move: whether samples under way may go on at other
    engines, and so depend on time.
    """

    step: int
    num_samples: int
    sampling: Sampling
    max_response_tokens: int
    run_seed: int
    prefixes: Mapping[tuple[str, int], Prefix] = field(default_factory=dict)
    last_is_greedy: bool = False
    with_nucleus: bool = False
    head_tokens: int = 0
    may_move: bool = False

    def sampling_of(self, sample_index: int) -> Sampling:
        """Return how the tokens of one of the samples of a prompt are sampled."""
        is_greedy = self.last_is_greedy and sample_index == self.num_samples - 1
        return replace(self.sampling, temperature=0.0) if is_greedy else self.sampling

    def prefix(self, uid: str, sample_index: int) -> Prefix:
        """Return the prefix that a response starts with, cut to the response limit; it may be empty."""
        prefix = self.prefixes.get((uid, sample_index), Prefix())
        if len(prefix.token_ids) <= self.max_response_tokens:
            return prefix
        return Prefix(token_ids=prefix.token_ids[: self.max_response_tokens])


# Judges read one sample in each turn of the loop, so that no number of samples keeps it from what else there is to do.
_one_at_a_time = asyncio.Lock()
# Handing a response to a thread that decodes it takes about as long as decoding this many tokens.
_LONG_TOKENS = 1024


@dataclass(slots=True, kw_only=True, eq=False)
class Group:
    """A prompt with its samples, by index: those that have finished, and those under way with their tokens so far.

    number, index: of its ticket, and of its prompt in the data. judging: takes each sample that finishes, if it is
    judged. asked: by index, the completion that a sample waits for. sampling: the task that samples the group.
    """

    prompt: Prompt
    plan: SamplingPlan
    number: int = 0
    index: int = 0
    judging: "Judging | None" = None
    samples: dict[int, Sample] = field(default_factory=dict)
    parts: dict[int, Sample] = field(default_factory=dict)
    asked: "dict[int, asyncio.Future[Completion]]" = field(default_factory=dict)
    sampling: "asyncio.Task[None] | None" = None

    @property
    def is_done(self) -> bool:
        return len(self.samples) == self.plan.num_samples

    async def finish(self, sample: Sample) -> None:
        """Take a finished sample, and hand it to judges that can start. NonFiniteError: a log-prob is not finite."""
        if not np.isfinite(sample.rollout_logprobs).all():
            raise NonFiniteError(
                f"step {self.plan.step}: rollout log-probs of row {sample.uid}/{sample.sample_index} are not finite; "
                f"the engine's weights or the record are spoiled: start from an earlier checkpoint, or record again"
            )
        self.samples[sample.sample_index] = sample
        self.parts.pop(sample.sample_index, None)
        if self.judging is not None:
            async with _one_at_a_time:
                if sample.num_response_tokens > _LONG_TOKENS:
                    self.judging.add(self.prompt, sample, await asyncio.to_thread(self.judging.read, sample))
                else:
                    self.judging.add(self.prompt, sample)
                await asyncio.sleep(0)


class Wait(Protocol):
    """Waits for `work`, of which samples are a part; `timeout_s` limits the time in which nothing is heard of any.

    It returns early if samples under way need the next weights, as those of an engine that died in an update.
    """

    def __call__(self, work: "asyncio.Future[None]", *, timeout_s: float, doing: Doing) -> None: ...


class RolloutSource(Protocol):
    """A source of samples. It works only while something is waited for."""

    async def sample(self, group: Group) -> None:
        """Finish all samples of a group; those in `group.parts` go on."""

    def parts(self, groups: Iterable[Group]) -> list[Sample]:
        """Return the samples under way that have tokens; their finish reason is `ABORT`. They go on."""
        return []


def begin(source: RolloutSource, groups: Iterable[Group]) -> None:
    """Begin to sample groups."""
    for group in groups:
        group.sampling = loop.spawn(source.sample(group))


def abandon(groups: Iterable[Group]) -> None:
    """Give up the samples of groups that are under way, so that no later wait goes on with them."""
    for group in groups:
        if group.sampling is not None:
            group.sampling.cancel()


async def all_sampled(groups: Iterable[Group], *, may_stop: bool = False) -> None:
    """Wait until groups have all of their samples, or with `may_stop` until a signal asks for a stop."""
    tasks = {group.sampling for group in groups if group.sampling is not None}
    while tasks and not (may_stop and last_stop_signal()):
        _, tasks = await asyncio.wait(tasks, timeout=LOOK_S if may_stop else None)


def collect(wait: Wait, groups: Sequence[Group], *, timeout_s: float, may_stop: bool = False) -> RolloutBatch:
    """Wait until groups have all of their samples, and return them.

    Raises SamplingStopped, with `may_stop`, if a signal asks for a stop before.
    """
    total = sum(group.plan.num_samples for group in groups)

    try:
        wait(
            loop.spawn(all_sampled(groups, may_stop=may_stop)),
            timeout_s=timeout_s,
            doing=lambda: f"generating: {sum(len(group.samples) for group in groups)} of {total} samples finished",
        )
        if may_stop and last_stop_signal() and not all(group.is_done for group in groups):
            raise SamplingStopped
    finally:
        abandon(groups)
    return rollout_of(groups)


def rollout_of(groups: Sequence[Group]) -> RolloutBatch:
    """Return all samples of finished groups, in the order of the groups."""
    return RolloutBatch(
        prompts={group.prompt.uid: group.prompt for group in groups},
        samples=tuple(group.samples[i] for group in groups for i in range(group.plan.num_samples)),
    )
