"""Judge samples by a language model: ask about each response or each pair, read the verdicts, and make rewards."""

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import combinations
from statistics import fmean, median
from typing import Any

from megarl.config.judges import JudgeConfig
from megarl.errors import ConfigError, RunError
from megarl.rewards.judge import Judged, Tally, mean_of
from megarl.rewards.llm.endpoint import Completions, JudgeCompletion, Request
from megarl.rewards.llm.templates import Asked, QuestionWriter, questions_of
from megarl.types import DROPPED, FinishReason, Prompt, Reward, Sample, prompt_segment
from megarl.types.judged import FinishedSample, Trouble

# The built-in templates ask judges to end with this.
SCORE_PATTERN = r"score\W*:\W*(-?\d+(?:\.\d+)?)"
WINNER_PATTERN = r"winner\W*:\W*(a|b|tie)\b"
WINNER_LABELS: Mapping[str, float] = {"a": 1.0, "b": 0.0, "tie": 0.5}


class VerdictReader:
    """Reads the verdicts that a configuration asks for."""

    def __init__(self, cfg: JudgeConfig) -> None:
        is_pairwise, verdict = cfg.mode == "pairwise", cfg.verdict
        labels = verdict.labels or (WINNER_LABELS if is_pairwise else {})
        self._labels = {word.strip().casefold(): number for word, number in labels.items()}
        self._pattern = re.compile(verdict.pattern or (WINNER_PATTERN if is_pairwise else SCORE_PATTERN), re.IGNORECASE)
        self._cfg = verdict

    def read(self, text: str, keys: Sequence[str]) -> dict[str, float]:
        """Return the verdict for each of `keys`, without those that cannot be read.

        keys: names of the criteria that the text judges, or the configured key; with a pattern, a single one.
        """
        if self._cfg.form == "pattern":
            matches = self._pattern.findall(text)
            found: Mapping[str, object] = {keys[0]: matches[-1]} if matches else {}
        else:
            objects = [each for each in _json_objects(text) if set(keys) & each.keys()]
            found = objects[-1] if objects else {}
        numbers = {key: self._number(found[key]) for key in keys if key in found}
        return {key: number for key, number in numbers.items() if number is not None}

    def _number(self, verdict: Any) -> float | None:
        """Return the number of a verdict, scaled to 0 to 1 if there is a scale; None if it is neither."""
        if isinstance(verdict, bool):
            verdict = "true" if verdict else "false"
        if isinstance(verdict, str) and (word := verdict.strip().casefold()) in self._labels:
            number = self._labels[word]
        else:
            try:
                number = float(verdict)
            except (TypeError, ValueError, OverflowError):
                return None
            if self._labels or not math.isfinite(number):
                return None
        if self._cfg.scale is None:
            return number
        low, high = self._cfg.scale
        return (number - low) / (high - low) if low <= number <= high else None


def combine(votes: Sequence[float], how: str) -> float:
    """Combine votes: their mean or median, or the most frequent one, among equally frequent ones the mean of these."""
    if how == "mean":
        return fmean(votes)
    if how == "median":
        return float(median(votes))
    most = max(map(votes.count, votes))
    return fmean({vote for vote in votes if votes.count(vote) == most})


def _json_objects(text: str) -> Iterator[dict[str, object]]:
    """Yield the JSON objects in a text that lie in no other one."""
    decoder, start = json.JSONDecoder(), text.find("{")
    while start >= 0:
        try:
            value, end = decoder.raw_decode(text, start)
        except ValueError:
            end = start + 1
        else:
            yield value
        start = text.find("{", end)


# A judge's text is kept from its end, in the rollout files and in the record of problems.
MAX_TEXT_CHARS = 4_000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """A request under way: about one response, or about two, of which the judge saw the first as A."""

    items: tuple[FinishedSample, ...]
    asked: Asked
    pending: Future[JudgeCompletion]


@dataclass(slots=True)
class _Verdicts:
    """The judge's verdicts on a response: votes by criterion, and the text of its last reply.

    outcome, reason: if that reply had no verdict, the kind of failure and its explanation.
    """

    votes: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    text: str = ""
    outcome: str = "unanswered"
    reason: str = "no other response to compare it with"


class LlmJudge:
    """A judge that is a language model; `name` stands in metrics and messages."""

    def __init__(self, cfg: JudgeConfig, completions: Completions, *, name: str, section: str | None = None) -> None:
        """Parse the template; ConfigError if it is malformed. section: the key in `rewards.judges`, if not `name`."""
        self.cfg, self.completions, self.name = cfg, completions, name
        self.section = section or name
        self.questions = questions_of(cfg)
        self.writer = QuestionWriter(cfg, name=self.section)
        self.reader = VerdictReader(cfg)

    def begin(self) -> "LlmSession":
        return LlmSession(self)

    def ask(self, *items: FinishedSample) -> list[_Call]:
        """Start to ask all questions about a response or a pair."""
        calls = []
        for asked in self.questions:
            messages = self.writer.chat(items, asked)
            for seed in range(self.cfg.sampling.votes):
                pending = self.completions.submit(Request(messages=messages, seed=seed))
                calls.append(_Call(items=items, asked=asked, pending=pending))
        return calls

    def compare(self, first: FinishedSample, second: FinishedSample) -> list[_Call]:
        """Ask about a pair in both orders, because judges prefer the first place or the second."""
        return self.ask(first, second) + self.ask(second, first)

    def finish(self, sessions: "Sequence[LlmSession]") -> Judged:
        """Wait for all verdicts.

        Raises:
            RunError: every endpoint refuses the requests; the budget is spent; no verdict could be read in any answer
                to at least two prompts; or, with `on_error=raise`, a row has no verdict.
        """
        items = [item for session in sessions for item in session.items]
        calls = [call for session in sessions for call in session.calls]
        if self.cfg.mode == "pairwise":
            met = {call.items for call in calls}
            groups: dict[str, list[FinishedSample]] = defaultdict(list)
            for item in items:
                groups[item.prompt.uid].append(item)
            for rows in groups.values():
                for i, j in pairs_of(len(rows), self.cfg.opponents):
                    if (rows[i], rows[j]) not in met:
                        calls += self.compare(rows[i], rows[j])
        self.completions.flush()
        completions = [call.pending.result() for call in calls]
        by_item = {item: _Verdicts() for item in items}
        num_unread = self._read(calls, completions, by_item)
        rewards, troubles = list[Reward](), list[Trouble]()
        for item, each in by_item.items():
            reward = self._reward(each)
            rewards.append(reward or self._without_verdict(item, each))
            if reward is None:
                troubles.append(Trouble(item=item, outcome=each.outcome, reason=each.reason, output=each.text))
        prefix = f"reward/{self.name}"
        asked = [each for each in completions if not each.is_cached]
        tallies = {
            f"{prefix}/requests": Tally(total=len(asked)),
            f"{prefix}/cached_requests": Tally(total=len(completions) - len(asked)),
            f"{prefix}/tokens": Tally(total=sum(each.tokens for each in asked)),
            f"{prefix}/unread_frac": Tally(total=num_unread, over=len(completions)),
            f"{prefix}/unjudged_rows": Tally(total=len(troubles)),
            f"{prefix}/unjudged_frac": Tally(total=len(troubles), over=len(rewards)),
            f"perf/reward_{self.name}_latency_s": mean_of(each.seconds for each in asked),
        }
        for name in self.cfg.criteria:
            scores = (reward.details[name] for reward in rewards if name in reward.details)
            tallies[f"{prefix}/{name}"] = mean_of(scores)
        return Judged(rewards=rewards, tallies=tallies, troubles=troubles)

    def _read(
        self,
        calls: Sequence[_Call],
        completions: Sequence[JudgeCompletion],
        by_item: Mapping[FinishedSample, _Verdicts],
    ) -> int:
        """Add what completions say of each response to `by_item`; return how many have an unread verdict."""
        num_read = num_unread = 0
        unread = ""
        for call, completion in zip(calls, completions, strict=True):
            if completion.is_refused:
                raise RunError(
                    f"rewards.judges.{self.section}.endpoint: refuses requests, as in {completion.reason}; "
                    "correct its urls, model or api_key_env, and --resume"
                )
            may_read = completion.text is not None and not completion.unread
            verdicts = self.reader.read(completion.text or "", call.asked.keys) if may_read else {}
            is_unread = completion.text is not None and len(verdicts) < len(call.asked.keys)
            num_read += bool(verdicts)
            num_unread += is_unread
            unread = completion.text or "" if is_unread else unread
            for place, item in enumerate(call.items):
                each = by_item[item]
                for key, verdict in verdicts.items():
                    each.votes[key].append(verdict if place == 0 else 1 - verdict)
                if completion.text is None:
                    each.outcome, each.reason = "unanswered", completion.reason
                else:
                    each.text = completion.text[-MAX_TEXT_CHARS:]
                    if is_unread:
                        each.outcome = "unread"
                        each.reason = completion.unread or "no verdict was found in what the judge wrote"
        if num_unread and not num_read and len({item.prompt.uid for item in by_item}) > 1:
            raise RunError(
                f"rewards.judges.{self.section}: no verdict was found in any of {num_unread} answers, the last: "
                f"{unread[-300:]!r}; correct its verdict or template, raise sampling.max_tokens, and --resume"
            )
        return num_unread

    def _reward(self, verdicts: _Verdicts) -> Reward | None:
        """Return the reward of a row, None if the verdict on a criterion is missing."""
        cfg = self.cfg
        keys = [key for asked in self.questions for key in asked.keys]
        if any(not verdicts.votes[key] for key in keys):
            return None
        how = cfg.sampling.combine if cfg.mode == "pointwise" else "mean"
        scores = {key: combine(verdicts.votes[key], how) for key in keys}
        details: Mapping[str, float] = scores if cfg.criteria else {}
        weights = {name: criterion.weight for name, criterion in cfg.criteria.items()}
        score = sum(weights.get(key, 1.0) * value for key, value in scores.items())
        return Reward(
            score=score,
            correct=score > cfg.correct_from,
            details=details,
            notes={f"{self.name}_said": verdicts.text},
        )

    def _without_verdict(self, item: FinishedSample, verdicts: _Verdicts) -> Reward:
        """Return the reward of a row without a verdict, as `on_error` says."""
        cfg = self.cfg
        if cfg.on_error == "raise":
            raise RunError(
                f"rewards.judges.{self.section}: no verdict on sample {item.label}: {verdicts.reason}; --resume, or "
                f"set rewards.judges.{self.section}.on_error"
            )
        return DROPPED if cfg.value is None else Reward(score=cfg.value, correct=False)

    def close(self) -> None:
        self.completions.close()


@dataclass(slots=True)
class LlmSession:
    """The judging of one group or batch by a language model.

    If all responses to a prompt are compared, each one meets those that finished before it as soon as it finishes. With
    fewer opponents, pairs depend on the number of responses, so they are asked about in `LlmJudge.finish`.
    """

    judge: LlmJudge
    items: list[FinishedSample] = field(default_factory=list)
    calls: list[_Call] = field(default_factory=list)

    def add(self, item: FinishedSample) -> None:
        if self.judge.cfg.mode == "pointwise":
            self.calls += self.judge.ask(item)
        elif self.judge.cfg.opponents is None:
            others = [other for other in self.items if other.prompt.uid == item.prompt.uid]
            self.calls += [call for other in others for call in self.judge.compare(other, item)]
        self.items.append(item)

    def pending(self) -> list[Future[JudgeCompletion]]:
        return [] if self.judge.completions.is_deferred else [call.pending for call in self.calls]


def pairs_of(num_rows: int, opponents: int | None) -> list[tuple[int, int]]:
    """Return the pairs in which each of `num_rows` rows meets `opponents` others, or all others if these are fewer.

    >>> pairs_of(3, None)
    [(0, 1), (0, 2), (1, 2)]
    >>> pairs_of(5, 2)
    [(0, 1), (1, 2), (2, 3), (3, 4), (4, 0)]
    """
    if opponents is None or opponents >= num_rows - 1:
        return list(combinations(range(num_rows), 2))
    return [(i, (i + distance) % num_rows) for distance in range(1, opponents // 2 + 1) for i in range(num_rows)]


def try_judge(judge: LlmJudge, prompt: Prompt) -> None:
    """Ask a judge about the ground truth as the answer to a prompt, and compare it with an empty one in pairwise mode.

    Raises ConfigError with the reason, and what the judge wrote, if there is no verdict.
    """
    judging = judge.begin()
    for index, response in enumerate(("", prompt.ground_truth)[-1 if judge.cfg.mode == "pointwise" else 0 :]):
        sample = Sample(
            uid=prompt.uid,
            sample_index=index,
            seed=0,
            segments=(prompt_segment(prompt.token_ids),),
            finish_reason=FinishReason.STOP,
        )
        text = "\n".join(message.content for message in prompt.messages)
        judging.add(FinishedSample(prompt=prompt, sample=sample, prompt_text=text, response=response))
    where = f"rewards.judges.{judge.section}: a trial"
    skip = f"or skip it with rewards.judges.{judge.section}.dry_run=false"
    try:
        troubles = judge.finish([judging]).troubles
    except RunError as error:
        raise ConfigError(f"{where} failed: {error}; {skip}") from error
    for trouble in troubles[:1]:
        said = f"\nIt wrote:\n{trouble.output}" if trouble.output else ""
        raise ConfigError(
            f"{where} with prompt {prompt.uid} gave no verdict: {trouble.reason}; correct the settings, {skip}{said}"
        )
