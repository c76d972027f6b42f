"""Judge samples by rule: run the data sources' scorers, or a user's function, in the worker processes of a pool."""

from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from megarl.config.rewards import RewardsConfig
from megarl.errors import DataError
from megarl.rewards.code.scorer import CODE, CodeOptions, Credit
from megarl.rewards.custom import judge_by_file
from megarl.rewards.judge import FinishedSample, Judged, Tally, mean_of
from megarl.rewards.scorers import PARSE_FAILED, SCORERS
from megarl.rewards.sources import SOURCES, SourceSpec, judge_by_source, source_spec
from megarl.rewards.verifier import JobOutcome, JobResult, VerifierJob, VerifierOptions, VerifierPool
from megarl.sandbox import Isolation, SandboxOptions
from megarl.types import DROPPED, Reward

# Outcomes that have metrics `reward/…_frac`; a scored response is correct or wrong.
_FRACTIONS = {"timed_out": "timeout", "crashed": "crashed", PARSE_FAILED: "parse_failed", "wrong": "wrong"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A response to judge, with its prompt, ground truth and further data."""

    data_source: str
    prompt: str
    response: str
    ground_truth: str
    extra_info: Mapping[str, Any] = field(default_factory=dict)


class Rules:
    """The rule that judges each data source, as the section `rewards` says: a scorer, or a function in the user's
    file.
    """

    def __init__(self, cfg: RewardsConfig) -> None:
        self.cfg = cfg
        self._specs: dict[str, SourceSpec] = {}

    def knows(self, data_source: str) -> bool:
        """Return whether a scorer or the user's file can judge a data source."""
        own = self.cfg.sources.get(data_source)
        if own is None or own.scorer is None:
            return self.cfg.custom.path is not None or data_source in {*SOURCES, *SCORERS}
        return own.scorer in {*SOURCES, *SCORERS}

    def spec(self, data_source: str) -> SourceSpec | None:
        """Return how a data source is judged: by a scorer, or (None) by the user's file. ConfigError for an unknown
        source.
        """
        own = self.cfg.sources.get(data_source)
        if self.cfg.custom.path is not None and (own is None or own.scorer is None):
            return None
        if data_source not in self._specs:
            changes = {} if own is None else {name: value for name, value in asdict(own).items() if value is not None}
            self._specs[data_source] = source_spec(data_source, **changes)
        return self._specs[data_source]

    def reward(self, data_source: str, result: JobResult) -> Reward:
        """Return the reward for a job's result. A response that a scorer could not judge counts as wrong.

        A response that the user's function could not judge is dropped, because only that function knows the reward of a
        wrong answer.
        """
        if result.reward is not None:
            return result.reward
        spec = self.spec(data_source)
        return DROPPED if spec is None else Reward(score=spec.wrong, correct=False, own_score=0.0)


class RuleJudge:
    """A judge that runs scorers in a pool of processes, for each sample as soon as it is added."""

    def __init__(self, cfg: RewardsConfig) -> None:
        """Start the pool that judges texts, without waiting. The pool for programs starts with the first program."""
        self.rules = Rules(cfg)
        options = VerifierOptions(
            num_workers=cfg.verifier.workers,
            soft_limit_s=cfg.verifier.soft_limit_s,
            deadline_s=cfg.verifier.hard_limit_s,
            memory_limit_mib=cfg.verifier.memory_mib,
            preload=("megarl.rewards", "math_verify"),
        )
        self._texts = VerifierPool(options)
        self._programs: VerifierPool | None = None
        self._program_options = CodeOptions(
            sandbox=SandboxOptions(
                isolation=Isolation(cfg.code.isolation), limits=cfg.code.limits, import_paths=cfg.code.import_paths
            ),
            credit=Credit(cfg.code.credit),
            float_tolerance=cfg.code.float_tolerance,
            max_tests=cfg.code.max_tests,
            max_timeouts=cfg.code.max_timeouts,
        )

    def submit(self, question: Question) -> Future[JobResult]:
        """Start to judge a response, and return a future of the result; errors are those of `VerifierPool.submit`."""
        cfg, pool = self.rules.cfg, self._texts
        spec = self.rules.spec(question.data_source)
        arguments: dict[str, Any] = {"data_source": question.data_source}
        function: Callable[..., Reward] = judge_by_source
        if spec is None:
            function = judge_by_file
            arguments |= {"path": cfg.custom.path, "name": cfg.custom.name, "prompt": question.prompt}
        else:
            is_program = spec.scorer == CODE
            arguments |= {"source": spec, "arguments": {"options": self._program_options} if is_program else {}}
            pool = self._program_pool() if is_program else pool
        job = VerifierJob(
            data_source=question.data_source,
            response=question.response,
            ground_truth=question.ground_truth,
            extra_info=question.extra_info,
            function=f"{function.__module__}:{function.__name__}",
            arguments=arguments,
        )
        return pool.submit(job)

    def _program_pool(self) -> VerifierPool:
        """Return the pool whose workers run programs, each in its own sandbox; start it on first use."""
        if self._programs is None:
            cfg, deadline_s = self.rules.cfg, self.rules.cfg.code.deadline_s
            options = VerifierOptions(
                num_workers=cfg.code.workers,
                # All tests of a program together take longer than a text.
                soft_limit_s=0.9 * deadline_s,
                deadline_s=deadline_s,
                start_limit_s=max(120.0, 2 * deadline_s),
                # The sandbox limits the memory of the programs themselves.
                memory_limit_mib=cfg.verifier.memory_mib + cfg.code.limits.memory_mib,
                preload=("megarl.rewards",),
            )
            self._programs = VerifierPool(options)
        return self._programs

    def begin(self) -> "RuleSession":
        return RuleSession(self)

    def close(self) -> None:
        for pool in (self._texts, self._programs):
            if pool is not None:
                pool.close()


@dataclass(slots=True)
class RuleSession:
    """The judging of one batch by rule, with a job for each sample."""

    judge: RuleJudge
    _items: list[FinishedSample] = field(default_factory=list)
    _pending: list[Future[JobResult]] = field(default_factory=list)

    def add(self, item: FinishedSample) -> None:
        question = Question(
            data_source=item.prompt.data_source,
            prompt=item.prompt_text,
            response=item.response,
            ground_truth=item.prompt.ground_truth,
            extra_info=item.prompt.extra_info,
        )
        self._items.append(item)
        self._pending.append(self.judge.submit(question))

    def is_ready(self) -> bool:
        return all(pending.done() for pending in self._pending)

    def absorb(self, other: Self) -> None:
        self._items += other._items
        self._pending += other._pending

    def finish(self) -> Judged:
        """Wait for all rewards; raise DataError that names the first sample whose ground truth is malformed."""
        early = mean_of(float(pending.done()) for pending in self._pending)
        results = []
        for item, pending in zip(self._items, self._pending, strict=True):
            try:
                results.append(pending.result())
            except DataError as error:
                raise DataError(f"sample {item.label}: {error}") from error
        counts = Counter(outcome_of(result) for result in results)
        details = [result.reward.details for result in results if result.reward is not None]
        names = {name for each in details for name in each} - {PARSE_FAILED}
        tallies = {
            "perf/reward_early_frac": early,
            **{f"reward/{name}_frac": Tally(total=counts[key], over=len(results)) for key, name in _FRACTIONS.items()},
            "perf/verifier_s": mean_of(result.seconds for result in results),
            **{f"reward/rule/{name}": mean_of(d[name] for d in details if name in d) for name in sorted(names)},
        }
        sources = [item.prompt.data_source for item in self._items]
        rewards = [self.judge.rules.reward(s, result) for s, result in zip(sources, results, strict=True)]
        return Judged(rewards=rewards, tallies=tallies)


def outcome_of(result: JobResult) -> JobOutcome | str:
    """Return the name under which a job's outcome is counted: "correct" or "wrong" if it was judged, else why it was
    not.
    """
    if result.outcome != "scored" or result.reward is None:
        return result.outcome
    return "correct" if result.reward.correct else "wrong"
