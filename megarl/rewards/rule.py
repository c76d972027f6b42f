"""Judge samples by rule: run the data sources' scorers, or a user's function, in the worker processes of a pool."""

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace

from megarl.config.rewards import RewardsConfig
from megarl.errors import DataError
from megarl.rewards.code.scorer import CODE, CodeOptions, Credit
from megarl.rewards.custom import CustomFunctions, CustomSession
from megarl.rewards.judge import Judged, Tally, mean_of
from megarl.rewards.question import Question, Verdict
from megarl.rewards.scorers import PARSE_FAILED, SCORERS, SOURCES, SourceSpec, judge_by_source, source_spec
from megarl.rewards.verifier import JobResult, VerifierJob, VerifierOptions, VerifierPool
from megarl.types import DROPPED, Reward
from megarl.types.judged import FinishedSample, Trouble
from megarl_sandbox import Isolation, SandboxOptions

# The detail of a scorer's reward that holds what the user's functions add to it.
_CUSTOM_SCORE = "custom/score"
# Outcomes that have metrics `reward/…_frac`, and the names that they have there.
FRACTIONS = {
    "timed_out": "timeout",
    "crashed": "crashed",
    "failed": "failed",
    PARSE_FAILED: "parse_failed",
    "wrong": "wrong",
}


class Rules:
    """The rule that judges each data source, as the section `rewards` says: a scorer, functions in the user's files,
    or both.
    """

    def __init__(self, cfg: RewardsConfig) -> None:
        self.cfg, self.custom = cfg, CustomFunctions(cfg)
        self._specs: dict[str, SourceSpec] = {}

    def knows(self, data_source: str) -> bool:
        """Return whether a scorer or the user's file can judge a data source."""
        own = self.cfg.sources.get(data_source)
        if own is None or own.scorer is None:
            return bool(self.custom.of(data_source)) or data_source in {*SOURCES, *SCORERS}
        return own.scorer in {*SOURCES, *SCORERS}

    def spec(self, data_source: str) -> SourceSpec | None:
        """Return how a scorer judges a data source, None if only the user's functions do. ConfigError for an unknown
        source.
        """
        own = self.cfg.sources.get(data_source)
        if (own is None or own.scorer is None) and self.custom.of(data_source):
            return None
        if data_source not in self._specs:
            changes = {} if own is None else {name: value for name, value in asdict(own).items() if value is not None}
            self._specs[data_source] = source_spec(data_source, **changes)
        return self._specs[data_source]

    def verdict(self, data_source: str, result: JobResult) -> Verdict:
        """Return the verdict of a scorer's job. A response that the scorer could not judge counts as wrong."""
        reward = result.reward
        if reward is None:
            spec = self.spec(data_source)
            assert spec is not None, "a scorer judged it"
            reward = Reward(score=spec.wrong, correct=False, own_score=0.0)
        outcome: str = result.outcome
        if outcome == "scored":
            outcome = "correct" if reward.correct else "wrong"
        reason = result.reason or ("no answer was found in the response" if outcome == PARSE_FAILED else "")
        return Verdict(reward=reward, outcome=outcome, seconds=result.seconds, reason=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A response in work: its name for messages, and its scorer's job."""

    label: str
    question: Question
    job: Future[JobResult] | None


class RuleJudge:
    """A judge that runs scorers in a pool of processes, for each sample as soon as it is added."""

    def __init__(self, cfg: RewardsConfig) -> None:
        """Start the pool of processes that judge texts, without waiting for them. The pool for programs starts with the
        first one.
        """
        self.rules = Rules(cfg)
        options = VerifierOptions(
            num_workers=cfg.verifier.workers,
            soft_limit_s=cfg.verifier.soft_limit_s,
            deadline_s=cfg.verifier.hard_limit_s,
            memory_limit_mib=cfg.verifier.memory_mib,
            preload=("megarl.rewards", "megarl_answers.symbolic", "math_verify"),
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

    def submit(self, question: Question, spec: SourceSpec) -> Future[JobResult]:
        """Start a scorer on a response, and return a future of the result, as `VerifierPool.submit` does."""
        is_program = spec.scorer.partition("/")[0] == CODE
        job = VerifierJob(
            data_source=question.data_source,
            response=question.response,
            ground_truth=question.ground_truth,
            extra_info=question.extra_info,
            function=f"{judge_by_source.__module__}:{judge_by_source.__name__}",
            arguments={
                "data_source": question.data_source,
                "source": spec,
                "arguments": {"options": self._program_options} if is_program else {},
            },
        )
        return (self._program_pool() if is_program else self._texts).submit(job)

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
        return RuleSession(self, self.rules.custom.begin())

    def verdicts(self, sessions: "Sequence[RuleSession]") -> list[Verdict]:
        """Wait for the verdicts on all responses; raise DataError that names the first whose ground truth is
        malformed, RunError as `CustomFunctions.finish` does.
        """
        custom, verdicts = self.rules.custom.finish([session.custom for session in sessions]), []
        for each in (asked for session in sessions for asked in session.asked):
            own = None
            if each.job is not None:
                try:
                    own = self.rules.verdict(each.question.data_source, each.job.result())
                except DataError as error:
                    raise DataError(f"{each.label}: {error}") from error
            verdicts.append(self._with_no_opinions(_sum(own, custom.get(each.question)), each))
        return verdicts

    def _with_no_opinions(self, verdict: Verdict, asked: _Asked) -> Verdict:
        """Name the functions that returned None, or are not asked about this source, by the details that their
        opinions would have had.
        """
        functions = self.rules.custom.functions
        if (reward := verdict.reward) is None or not functions:
            return verdict
        opinions = {f"{name}/score" for name in functions} if len(functions) > 1 else set()
        if asked.job is not None:
            opinions.add(_CUSTOM_SCORE)
        silent = sorted(opinions - reward.details.keys())
        return replace(verdict, reward=replace(reward, no_opinion=(*reward.no_opinion, *silent)))

    def finish(self, sessions: "Sequence[RuleSession]") -> Judged:
        """Wait for all rewards, and return them with metrics and problems; raises as `verdicts` does."""
        early = mean_of(float(pending.done()) for session in sessions for pending in session.pending())
        verdicts = self.verdicts(sessions)
        items = [item for session in sessions for item in session.items]
        counts = Counter(verdict.outcome for verdict in verdicts)
        details = [verdict.reward.details for verdict in verdicts if verdict.reward is not None]
        names = {name for each in details for name in each} - {PARSE_FAILED}
        tallies = {
            "perf/reward_early_frac": early,
            **{f"reward/{name}_frac": Tally(total=counts[key], over=len(verdicts)) for key, name in FRACTIONS.items()},
            "perf/verifier_s": mean_of(verdict.seconds for verdict in verdicts),
            **{f"reward/rule/{name}": mean_of(d[name] for d in details if name in d) for name in sorted(names)},
        }
        return Judged(
            rewards=[DROPPED if each.reward is None else each.reward for each in verdicts],
            tallies=tallies,
            troubles=[
                Trouble(item=item, outcome=each.outcome, reason=each.reason, output=each.output)
                for item, each in zip(items, verdicts, strict=True)
                if each.outcome not in ("correct", "wrong")
            ],
        )

    def close(self) -> None:
        self.rules.custom.close()
        for pool in (self._texts, self._programs):
            if pool is not None:
                pool.close()


@dataclass(slots=True)
class RuleSession:
    """The judging of one group or batch by rule, with a job for each sample, and the calls of the user's functions."""

    judge: RuleJudge
    custom: CustomSession
    items: list[FinishedSample] = field(default_factory=list)
    asked: list[_Asked] = field(default_factory=list)

    def add(self, item: FinishedSample) -> None:
        needs_ids = self.judge.rules.custom.need_ids(item.prompt.data_source)
        ids = tuple(item.sample.last_turn_ids.tolist()) if needs_ids else ()
        question = Question(
            data_source=item.prompt.data_source,
            prompt=item.prompt_text,
            response=item.response,
            ground_truth=item.prompt.ground_truth,
            extra_info=item.prompt.extra_info,
            messages=item.prompt.messages,
            group=item.prompt.uid,
            response_ids=ids,
            label=item.prompt.label,
            is_text=item.prompt.is_text,
        )
        self.items.append(item)
        self.ask(question, label=f"sample {item.label}")

    def ask(self, question: Question, *, label: str) -> None:
        """Start to judge a response, without waiting; `label` names it in messages."""
        rules, source = self.judge.rules, question.data_source
        spec = rules.spec(source)
        if rules.custom.of(source):
            self.custom.add(question)
        job = None if spec is None else self.judge.submit(question, spec)
        self.asked.append(_Asked(label=label, question=question, job=job))

    def pending(self) -> list[Future[JobResult]]:
        """Return all jobs that have begun; groups and batches begin in `RuleJudge.verdicts`."""
        jobs = [each.job for each in self.asked if each.job is not None]
        return [*(job for _, _, job in self.custom.calls), *jobs]


def _sum(own: Verdict | None, theirs: Verdict | None) -> Verdict:
    """Add the reward by the user's functions to that of the scorer, which decides what is correct."""
    if own is None or own.reward is None or theirs is None:
        found = own if theirs is None else theirs
        assert found is not None, "a source that nobody judges was refused"
        return found
    if theirs.outcome == "abstained":
        return own
    if theirs.reward is None:
        return theirs
    mine, other = own.reward, theirs.reward
    reward = replace(
        mine,
        score=mine.score + other.score,
        details={**other.details, **mine.details, _CUSTOM_SCORE: other.score},
        notes={**other.notes, **mine.notes},
        own_score=mine.score if mine.own_score is None else mine.own_score,
        no_opinion=(*other.no_opinion, *mine.no_opinion),
    )
    return replace(own, reward=reward, seconds=own.seconds + theirs.seconds)
