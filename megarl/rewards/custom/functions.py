"""Ask users' functions about responses: start their workers, decide what is asked together, and mix their rewards."""

import inspect
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

from megarl.config.rewards import FunctionConfig, RewardsConfig
from megarl.errors import RunError
from megarl.host.child_environment import child_environment
from megarl.rewards.custom.call import call_function, is_async
from megarl.rewards.custom.signatures import IDS, RewardFunction, load_function, signature_of
from megarl.rewards.question import Question, Verdict
from megarl.rewards.verifier import JobResult, VerifierJob, VerifierOptions, VerifierPool
from megarl.types import Reward

# Rows of which calls of an `async def` proceed at the same time in one worker.
ASYNC_ROWS = 32
# A function, the rows that it was asked about, and its answer.
CustomCall: TypeAlias = tuple[str, list[Question], Future[JobResult]]
# An exception or a result that is not a reward; too late; the end of the process.
FAILURES = ("failed", "timed_out", "crashed")


class CustomFunctions:
    """The reward functions of `rewards.custom`, by name, and the pool of processes that they run in.

    The pool starts with the first question. Threads may share this object.
    """

    def __init__(self, rewards: RewardsConfig) -> None:
        self.cfg, self._sources = rewards.custom, rewards.sources
        self.functions: Mapping[str, FunctionConfig] = self.cfg.all_functions()
        self._pool: VerifierPool | None = None
        self._lock = threading.Lock()

    def of(self, data_source: str) -> list[str]:
        """Return the names of the functions that name a data source or, if none does and `rewards.sources` names no
        scorer for it, of those that name no source.
        """
        named = [name for name, each in self.functions.items() if data_source in each.sources]
        own = self._sources.get(data_source)
        if named or (own is not None and own.scorer is not None):
            return named
        return [name for name, each in self.functions.items() if not each.sources]

    def check(self) -> None:
        """Load every file; raise ConfigError if a function is missing, or has parameters that megarl cannot fill, or a
        variable of `pass_env` is not set.
        """
        _ = self.per, child_environment(self.cfg.pass_env, key="rewards.custom.pass_env")

    @cached_property
    def _loaded(self) -> Mapping[str, RewardFunction]:
        return {name: load_function(Path(each.path), each.name) for name, each in self.functions.items()}

    @cached_property
    def per(self) -> Mapping[str, str]:
        """Return what a call of each function contains: a `row`, `group` or `batch`; without lists always a row."""
        return {
            name: each.per if signature_of(self._loaded[name], Path(each.path), each.arguments).takes_rows else "row"
            for name, each in self.functions.items()
        }

    @cached_property
    def in_flight(self) -> Mapping[str, bool]:
        """Return which functions are called row by row and are coroutine functions, so that calls may overlap."""
        return {name: self.per[name] == "row" and is_async(each) for name, each in self._loaded.items()}

    def need_ids(self, data_source: str) -> bool:
        """Return whether `Question.response_ids` must be filled for a data source."""
        return any(IDS in inspect.signature(self._loaded[name]).parameters for name in self.of(data_source))

    def begin(self) -> "CustomSession":
        """Begin to judge a batch."""
        return CustomSession(self)

    def ask(self, name: str, rows: Sequence[Question]) -> Future[JobResult]:
        """Start a call of a function about these rows, without waiting."""
        with self._lock:
            self._pool = self._pool or self._start()
        each, limit_s = self.functions[name], self.cfg.timeout_s
        arguments: dict[str, object] = {
            "rows": list(rows),
            "path": each.path,
            "name": each.name,
            "arguments": dict(each.arguments),
            "together": self.per[name] != "row",
            "limit_s": limit_s,
        }
        return self._pool.submit(
            VerifierJob(
                data_source=rows[0].data_source,
                response="",
                ground_truth="",
                function=f"{call_function.__module__}:{call_function.__name__}",
                arguments=arguments,
                # Calls that overlap have limits of their own, which time that one of them takes from others prolongs.
                deadline_s=2 * limit_s if len(rows) > 1 and self.in_flight[name] else None,
            )
        )

    def ask_parts(self, name: str, rows: Sequence[Question]) -> list[CustomCall]:
        """Ask a function about rows: by group or all at once, or in one part for each worker."""
        parts: dict[object, list[Question]] = {}
        for i, row in enumerate(rows):
            part = {"row": i % self.cfg.workers, "batch": 0, "group": row.group}[self.per[name]]
            parts.setdefault(part, []).append(row)
        return [(name, members, self.ask(name, members)) for members in parts.values()]

    def _start(self) -> VerifierPool:
        return VerifierPool(
            VerifierOptions(
                num_workers=self.cfg.workers,
                # The soft limit is on CPU time.
                soft_limit_s=0.9 * self.cfg.timeout_s,
                deadline_s=self.cfg.timeout_s,
                start_limit_s=max(300.0, 2 * self.cfg.timeout_s),
                memory_limit_mib=self.cfg.memory_mib,
                # A function may keep a model or tables in memory.
                recycle_mib=self.cfg.memory_mib,
                preload=("megarl.rewards", "megarl_answers.symbolic"),
                pass_env=self.cfg.pass_env,
            )
        )

    def finish(self, sessions: "Sequence[CustomSession]") -> dict[Question, Verdict]:
        """Wait for all calls, and return a verdict on each row, with the weighted sum of the functions' rewards.

        Raises RunError if a function fails on every row of at least two prompts or, with `on_error=raise`, on any row.
        """
        by_function = self.opinions(sessions)
        for name, verdicts in by_function.items():
            self._require_success(name, verdicts)
        return {
            row: self._mix({name: each[row] for name, each in by_function.items() if row in each})
            for session in sessions
            for row in session.rows
        }

    def opinions(self, sessions: "Sequence[CustomSession]") -> dict[str, dict[Question, Verdict]]:
        """Wait for all calls, and return the verdicts of each function by row, in the order of the configuration."""
        calls = [call for session in sessions for call in session.calls]
        waiting: dict[str, list[Question]] = {}
        for session in sessions:
            for name, rows in session.waiting.items():
                waiting.setdefault(name, []).extend(rows)
        for name, rows in waiting.items():
            calls += self.ask_parts(name, rows)
        opinions: dict[str, dict[Question, Verdict]] = {name: {} for name in self.functions}
        again: list[CustomCall] = []
        for name, rows, pending in calls:
            if len(rows) > 1 and self.per[name] == "row" and not pending.result().verdicts:
                # One of these calls has stopped the process in which all were under way.
                again += [(name, [row], self.ask(name, [row])) for row in rows]
            else:
                opinions[name] |= zip(rows, _verdicts(pending.result(), len(rows)), strict=True)
        for name, rows, pending in again:
            opinions[name] |= zip(rows, _verdicts(pending.result(), 1), strict=True)
        return {name: each for name, each in opinions.items() if each}

    def _require_success(self, name: str, verdicts: Mapping[Question, Verdict]) -> None:
        failed = [row for row, each in verdicts.items() if each.outcome in FAILURES]
        if not failed:
            return
        which = f"rewards.custom: the function {name} failed on {len(failed)} of {len(verdicts)} rows"
        first = verdicts[failed[0]]
        said = f"the first, of {failed[0].data_source!r} ({first.outcome}): {first.reason}"
        if self.cfg.on_error == "raise":
            raise RunError(f"{which}, {said}; correct it and --resume, or set rewards.custom.on_error=drop_rows")
        # All answers to one odd prompt may fail.
        if len(failed) == len(verdicts) and len({row.group for row in failed}) > 1:
            raise RunError(f"{which}, so nothing is left to train on, {said}; correct it and --resume")

    def _mix(self, opinions: Mapping[str, Verdict]) -> Verdict:
        """Combine the functions' verdicts on a row: rewards by weights, the rest from the first that has an opinion."""
        cfg, functions = self.cfg, self.functions
        seconds = sum(each.seconds for each in opinions.values())
        troubles = [each for each in opinions.values() if each.reward is None and each.outcome != "abstained"]
        if troubles and cfg.on_error != "value":
            return troubles[0]
        heard = {name: each for name, each in opinions.items() if each.outcome != "abstained"}
        if not heard:
            return Verdict(reward=None, outcome="abstained", reason="no function has an opinion on it")
        fallback = Reward(score=cfg.value or 0.0, correct=False)
        rewards = {name: each.reward or fallback for name, each in heard.items()}
        first = next(iter(rewards.values()))
        details, notes, silent = dict(first.details), dict(first.notes), first.no_opinion
        if len(functions) > 1:
            details = {f"{name}/{key}": value for name, each in rewards.items() for key, value in each.details.items()}
            details |= {f"{name}/score": each.score for name, each in rewards.items()}
            notes = {f"{name}/{key}": value for name, each in rewards.items() for key, value in each.notes.items()}
            silent = tuple(f"{name}/{key}" for name, each in rewards.items() for key in each.no_opinion)
        score = sum(functions[name].weight * each.score for name, each in rewards.items())
        own = first.score if first.own_score is None and (len(rewards) > 1 or score != first.score) else first.own_score
        reward = Reward(
            score=score, correct=first.correct, details=details, notes=notes, own_score=own, no_opinion=silent
        )
        told = troubles[0] if troubles else next(iter(heard.values()))
        return Verdict(reward=reward, outcome=told.outcome, seconds=seconds, reason=told.reason, output=told.output)

    def close(self) -> None:
        """End the workers."""
        if self._pool is not None:
            self._pool.close()


@dataclass(slots=True)
class CustomSession:
    """The judging of one group or batch by users' functions.

    A function of single rows is asked about each row at once, a coroutine function about `ASYNC_ROWS` at a time; a
    function of groups or batches has to wait until `CustomFunctions.finish`.
    """

    functions: CustomFunctions
    rows: list[Question] = field(default_factory=list)
    calls: list[CustomCall] = field(default_factory=list)
    waiting: dict[str, list[Question]] = field(default_factory=dict)

    def add(self, question: Question) -> None:
        """Accept a response, without waiting."""
        self.rows.append(question)
        for name in self.functions.of(question.data_source):
            waiting = self.waiting.setdefault(name, [])
            waiting.append(question)
            per, in_flight = self.functions.per[name], self.functions.in_flight[name]
            if per == "row" and (not in_flight or len(waiting) == ASYNC_ROWS):
                self.calls += self.functions.ask_parts(name, self.waiting.pop(name))


def _verdicts(result: JobResult, num_rows: int) -> list[Verdict]:
    """Return the verdicts of a call; if it was killed or its process ended, there are none on any of its rows."""
    if not result.verdicts:
        return [Verdict(reward=None, outcome=result.outcome, seconds=result.seconds, reason=result.reason)] * num_rows
    return [replace(each, seconds=result.seconds / num_rows) for each in result.verdicts]
