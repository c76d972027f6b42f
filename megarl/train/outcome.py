"""Look at what the first steps come to, so that nothing is taken for learning: conversations that all failed, answers
that were all cut, and groups without differences. `megarl.train.watch` has updates that move no weight.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megarl.algos.filters import filter_scores
from megarl.config.algo import FilterConfig
from megarl.errors import RunError
from megarl.train.groups import JudgedGroup
from megarl.types import FinishReason, Prompt, Reward, Sample
from megarl.types.judged import Trouble

# If so large a share of the first responses is cut, engines probably do not know how the model ends an answer.
MANY_CUT = 0.95
# This many steps without anything to learn from are no accident.
NUM_FIRST_STEPS = 3
# Outcomes of samples that nobody could judge, whatever the policy wrote.
FAILURES = ("failed", "timed_out", "crashed", "unanswered")
_MAX_CHARS = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """The sum of what the samples of a step came to, those of removed groups among them.

    failures: the troubles for which samples could not be judged. num_failed: how many samples they are about. is_flat:
    whether all samples of each judged group got the same reward; False: none was judged. example: one sample of these.
    """

    num_samples: int = 0
    cut_frac: float = 0.0
    failures: Sequence[Trouble] = ()
    num_failed: int = 0
    is_flat: bool = False
    example: tuple[Prompt, Sample, Reward] | None = None

    @classmethod
    def of(cls, groups: Sequence[JudgedGroup], troubles: Sequence[Trouble]) -> "StepOutcome":
        """Return the outcome of judged groups, about whose samples judges told these troubles."""
        samples = [sample for each in groups for sample in each.group.samples.values()]
        failures = [each for each in troubles if each.outcome in FAILURES]
        judged = [each for each in groups if each.is_judged and each.rewards]
        pairs = ((each.group.prompt, *pair) for each in judged for pair in zip(each.samples, each.rewards, strict=True))
        return cls(
            num_samples=len(samples),
            cut_frac=statistics.fmean(sample.finish_reason is FinishReason.LENGTH for sample in samples),
            failures=failures,
            num_failed=len({each.item.label for each in failures}),
            is_flat=bool(judged) and all(len({reward.score for reward in each.rewards}) == 1 for each in judged),
            example=next(pairs, None),
        )

    @property
    def all_failed(self) -> bool:
        """Return whether every sample failed, so that the step says nothing about the policy."""
        return self.num_failed == self.num_samples > 0 and (self.is_flat or self.example is None)

    @property
    def cause(self) -> str:
        """Return the first failure in words."""
        return _cause(self.failures)


@dataclass(slots=True, kw_only=True)
class FirstSteps:
    """The sum of what the first steps of a run came to so far.

    num_flat: the steps so far without differences; None once there were some. is_heard: whether some sample was judged.
    """

    total_steps: int
    num_flat: int | None = 0
    is_heard: bool = False

    def nothing_heard(self, outcome: StepOutcome) -> bool:
        """Return whether all samples of a step failed, and all those before it."""
        self.is_heard = self.is_heard or not outcome.all_failed
        return not self.is_heard

    def warnings(
        self,
        step: int,
        outcome: StepOutcome,
        *,
        teaches: bool,
        is_judged: bool = True,
        read: Callable[[Sample], str],
        of_cut: Callable[[float], str],
    ) -> list[str]:
        """Return the warnings after a step.

        teaches: whether the step had something to learn from all the same. is_judged: whether rewards mean something.
        read: returns the text of a response. of_cut: returns the warning about a share of responses that were cut.
        """
        found = []
        if step == 1 and outcome.cut_frac >= MANY_CUT:
            found.append(of_cut(outcome.cut_frac))
        if self.num_flat is not None:
            self.num_flat = self.num_flat + 1 if outcome.is_flat and not teaches else None
            if self.num_flat == min(NUM_FIRST_STEPS, self.total_steps):
                found.append(
                    flat_warning(outcome, self.num_flat, read)
                    if is_judged
                    else f"warning: in the first {self.num_flat} steps the teacher gave all tokens the probabilities "
                    "that the policy gave them, from which nothing is learned; name another teacher "
                    "(teacher.model_path), or prompts with hints"
                )
        return found


def judged_in_words(groups: Sequence[JudgedGroup], outcome: StepOutcome, cfg: FilterConfig) -> str:
    """Say how the groups of a step were judged of which the filter kept none."""
    means = [statistics.fmean(filter_scores(group.rewards, cfg)) for group in groups if group.is_judged]
    spread = f", whose means of {cfg.by!r} are {min(means):g} to {max(means):g}" if means else ""
    failed = f" ({outcome.num_failed} samples failed, the first of them: {outcome.cause})" if outcome.failures else ""
    return f"{len(means)} judged groups{spread}, {len(groups) - len(means)} that could not be judged{failed}"


def all_failed_error(place: str, num_samples: int, failures: Sequence[Trouble], more: str = "") -> RunError:
    """Return the error to end with where nothing was heard of so many samples but failures; `more` tells of others."""
    return RunError(
        f"{place}: all {num_samples} samples failed, the first of them: {_cause(failures)}; mend what fails, and start "
        f"again{more}"
    )


def cut_warning(cut_frac: float, limit: int, ends: Sequence[str]) -> str:
    """Return a warning about the first responses, nearly all of which were cut at the limit, before any of the ends."""
    return (
        f"warning: {cut_frac:.0%} of the responses of step 1 were cut at rollout.max_response_tokens={limit}, before "
        f"any of the ends {', '.join(map(repr, ends))}; raise the limit or, if the model ends answers in another way, "
        "set rollout.stop_token_ids or rollout.stop to its end"
    )


def flat_warning(outcome: StepOutcome, num_steps: int, read: Callable[[Sample], str]) -> str:
    """Return a warning about steps in which no group had a difference, with a sample of the latest."""
    assert outcome.example is not None, "a flat group has samples"
    prompt, sample, reward = outcome.example
    question = prompt.messages[-1].content if prompt.messages else prompt.uid
    troubles = (each for each in outcome.failures if each.item.sample is sample)
    why = next((f", {each.outcome}: {_line(each.reason)}" for each in troubles), "")
    return (
        f"warning: in each group of the first {num_steps} steps all samples got the same reward, from which most "
        f"algorithms learn nothing; for example, to {_line(question)!r} the answer was {_line(read(sample))!r}, "
        f"expected {_line(prompt.ground_truth)!r}, judged {'right' if reward.correct else 'wrong'} with the reward "
        f"{reward.score:g}{why}; `megarl report RUN` shows more"
    )


def _cause(failures: Sequence[Trouble]) -> str:
    first = next(iter(failures), None)
    return f"{first.judge or 'the judge'} {first.outcome}, {_line(first.reason)}" if first else "nobody judged it"


def _line(text: str) -> str:
    """Return a text as one short line, without its middle if it is long."""
    line = " ".join(text.split())
    return line if len(line) <= _MAX_CHARS else f"{line[: _MAX_CHARS // 2]} … {line[-_MAX_CHARS // 2 :]}"
