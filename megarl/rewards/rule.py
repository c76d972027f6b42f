"""The rule: scorers by data source, and functions of a user's file, in the worker processes of a pool."""

from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Any

from megarl.config.rewards import CodeConfig, RewardsConfig, VerifierConfig
from megarl.errors import DataError
from megarl.rewards.code.options import CodeOptions, Credit
from megarl.rewards.code.scorer import CODE
from megarl.rewards.judge import Item, Judged, Tally, mean_of
from megarl.rewards.registry import PARSE_FAILED, SCORERS
from megarl.rewards.rule_jobs import judge_by_file, judge_by_source
from megarl.rewards.sources import SOURCES, SourceSpec, source_spec
from megarl.rewards.verifier import Outcome, Verdict, VerifierJob, VerifierOptions, VerifierPool
from megarl.sandbox import Isolation, SandboxOptions
from megarl.types import DROPPED, Reward

# Metrics `reward/…_frac` of outcomes; what was scored is right or wrong.
_FRACTIONS = {"timed_out": "timeout", "crashed": "crashed", PARSE_FAILED: "parse_failed", "wrong": "wrong"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A response and what it is judged by."""

    data_source: str
    prompt: str
    response: str
    ground_truth: str
    extra_info: Mapping[str, Any] = field(default_factory=dict)


class Rules:
    """Who judges which data source, as the section `rewards` says."""

    def __init__(self, cfg: RewardsConfig) -> None:
        self._cfg = cfg
        self._specs: dict[str, SourceSpec] = {}

    def knows(self, data_source: str) -> bool:
        """Whether there is a rule for a data source."""
        return self._by_file(data_source) or self._scorer(data_source) in {*SOURCES, *SCORERS}

    def spec(self, data_source: str) -> SourceSpec | None:
        """How a data source is judged; None: by the custom file. ConfigError lists the known sources."""
        if self._by_file(data_source):
            return None
        if data_source not in self._specs:
            own = self._cfg.sources.get(data_source)
            changes = {} if own is None else {name: value for name, value in asdict(own).items() if value is not None}
            self._specs[data_source] = source_spec(data_source, **changes)
        return self._specs[data_source]

    def job(self, question: Question) -> VerifierJob:
        """What a worker is to do."""
        spec, source = self.spec(question.data_source), {"data_source": question.data_source}
        custom = {"path": self._cfg.custom.path, "name": self._cfg.custom.name, "prompt": question.prompt}
        scorer = {"source": spec, "arguments": self.arguments(spec)}
        function = judge_by_file if spec is None else judge_by_source
        return VerifierJob(
            data_source=question.data_source,
            response=question.response,
            ground_truth=question.ground_truth,
            extra_info=question.extra_info,
            function=f"{function.__module__}:{function.__name__}",
            arguments=source | (custom if spec is None else scorer),
        )

    def arguments(self, spec: SourceSpec | None) -> Mapping[str, Any]:
        """What the scorer takes besides the response."""
        return {"options": code_options(self._cfg.code)} if runs_programs(spec) else {}

    def reward(self, data_source: str, verdict: Verdict) -> Reward:
        """What a verdict is worth: an answer that no scorer could judge in time is wrong.

        What wrong is worth to a custom function only that knows, so such a row does not train.
        """
        if verdict.reward is not None:
            return verdict.reward
        spec = self.spec(data_source)
        return DROPPED if spec is None else Reward(score=spec.wrong, correct=False)

    def _scorer(self, data_source: str) -> str:
        own = self._cfg.sources.get(data_source)
        return data_source if own is None or own.scorer is None else own.scorer

    def _by_file(self, data_source: str) -> bool:
        own = self._cfg.sources.get(data_source)
        return self._cfg.custom.path is not None and (own is None or own.scorer is None)


def verifier_options(cfg: VerifierConfig) -> VerifierOptions:
    """The pool that the configuration asks for."""
    return VerifierOptions(
        num_workers=cfg.workers,
        soft_limit_s=cfg.soft_limit_s,
        deadline_s=cfg.hard_limit_s,
        memory_limit_mib=cfg.memory_mib,
        preload=("megarl.rewards.rule_jobs", "math_verify"),
    )


def program_options(cfg: RewardsConfig) -> VerifierOptions:
    """The pool whose workers run programs, each in a sandbox of its own: all tests together take longer."""
    deadline_s = cfg.code.deadline_s
    return VerifierOptions(
        num_workers=cfg.code.workers,
        soft_limit_s=0.9 * deadline_s,
        deadline_s=deadline_s,
        start_limit_s=max(120.0, 2 * deadline_s),
        # The programs' own memory is the sandbox's to limit.
        memory_limit_mib=cfg.verifier.memory_mib + cfg.code.limits.memory_mib,
        preload=("megarl.rewards.rule_jobs",),
    )


def code_options(cfg: CodeConfig) -> CodeOptions:
    """How programs are run."""
    sandbox = SandboxOptions(isolation=Isolation(cfg.isolation), limits=cfg.limits, import_paths=cfg.import_paths)
    return CodeOptions(
        sandbox=sandbox,
        credit=Credit(cfg.credit),
        float_tolerance=cfg.float_tolerance,
        max_tests=cfg.max_tests,
        max_timeouts=cfg.max_timeouts,
    )


def runs_programs(spec: SourceSpec | None) -> bool:
    """Whether responses of a data source are programs."""
    return spec is not None and spec.scorer == CODE


class RuleJudge:
    """Judges each sample in a pool, as soon as it is told of it."""

    def __init__(self, cfg: RewardsConfig) -> None:
        """Starts the pool, without waiting for it; that of programs when the first one comes."""
        self.rules, self._cfg = Rules(cfg), cfg
        self._texts = VerifierPool(verifier_options(cfg.verifier))
        self._programs: VerifierPool | None = None

    def submit(self, question: Question) -> Future[Verdict]:
        """The verdict on one response, when it is there; raises as `VerifierPool.submit` says."""
        return self._pool(question.data_source).submit(self.rules.job(question))

    def _pool(self, data_source: str) -> VerifierPool:
        if not runs_programs(self.rules.spec(data_source)):
            return self._texts
        if self._programs is None:
            self._programs = VerifierPool(program_options(self._cfg))
        return self._programs

    def begin(self) -> "RuleJudging":
        return RuleJudging(self)

    def close(self) -> None:
        for pool in (self._texts, self._programs):
            if pool is not None:
                pool.close()


@dataclass(slots=True)
class RuleJudging:
    """A job per sample."""

    judge: RuleJudge
    _items: list[Item] = field(default_factory=list)
    _verdicts: list[Future[Verdict]] = field(default_factory=list)

    def add(self, item: Item) -> None:
        prompt = item.prompt
        question = Question(
            data_source=prompt.data_source,
            prompt=item.prompt_text,
            response=item.response,
            ground_truth=prompt.ground_truth,
            extra_info=prompt.extra_info,
        )
        self._items.append(item)
        self._verdicts.append(self.judge.submit(question))

    def finish(self) -> Judged:
        """DataError names the first sample whose ground truth is malformed."""
        early = mean_of(float(verdict.done()) for verdict in self._verdicts)
        verdicts = [_verdict(item, pending) for item, pending in zip(self._items, self._verdicts, strict=True)]
        sources = [item.prompt.data_source for item in self._items]
        return Judged(
            rewards=[self.judge.rules.reward(s, v) for s, v in zip(sources, verdicts, strict=True)],
            tallies={"perf/reward_early_frac": early, **_tallies(verdicts)},
        )


def _verdict(item: Item, pending: Future[Verdict]) -> Verdict:
    try:
        return pending.result()
    except DataError as error:
        raise DataError(f"sample {item.label}: {error}") from error


def outcome_of(verdict: Verdict) -> Outcome | str:
    """The pool's outcome, and of what was scored whether it is right: one of correct, wrong."""
    if verdict.outcome != "scored" or verdict.reward is None:
        return verdict.outcome
    return "correct" if verdict.reward.correct else "wrong"


def _tallies(verdicts: list[Verdict]) -> dict[str, Tally]:
    counts, n = Counter(outcome_of(verdict) for verdict in verdicts), len(verdicts)
    details = [verdict.reward.details for verdict in verdicts if verdict.reward is not None]
    names = {name for each in details for name in each} - {PARSE_FAILED}
    return {
        **{f"reward/{name}_frac": Tally(total=counts[key], over=n) for key, name in _FRACTIONS.items()},
        "perf/verifier_s": mean_of(verdict.seconds for verdict in verdicts),
        **{f"reward/rule/{name}": mean_of(d[name] for d in details if name in d) for name in sorted(names)},
    }
