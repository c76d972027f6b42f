"""Define how each data source is rewarded: which scorer judges it, and the rewards of correct and wrong answers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from megarl.errors import ConfigError
from megarl.registry import unknown_name
from megarl.rewards.scorers import FORMATS, PARSE_FAILED, SCORERS
from megarl.rewards.truths import TruthReader
from megarl.types import Reward
from megarl_answers import Mode


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSpec:
    """The reward of responses to prompts of one data source: wrong + (correct − wrong)·x, with x in [0, 1].

    x is the scorer's score s, mixed with the format if that has a weight w: x = (1 − w)·s + w·[the format is right].

    scorer: name in `SCORERS`.
    correct, wrong: rewards of x = 1 and x = 0.
    malformed: reward if no answer could be parsed; None: the same as `wrong`.
    mode: how answers are found and compared, for scorers that have modes.
    format, format_weight: name in `FORMATS`, and w.
    """

    scorer: str
    correct: float = 1.0
    wrong: float = 0.0
    malformed: float | None = None
    mode: Mode = "fix"
    format: str | None = None
    format_weight: float = 0.0

    def __post_init__(self) -> None:
        values = (self.correct, self.wrong, self.wrong if self.malformed is None else self.malformed)
        if not all(math.isfinite(value) for value in values) or self.correct <= self.wrong:
            raise ConfigError(
                f"rewards of scorer {self.scorer!r}: got correct={self.correct}, wrong={self.wrong}, "
                f"malformed={self.malformed}, expected finite numbers with correct > wrong"
            )
        if not 0.0 <= self.format_weight < 1.0 or (self.format is None) != (self.format_weight == 0.0):
            raise ConfigError(
                f"rewards of scorer {self.scorer!r}: got format={self.format}, format_weight={self.format_weight}, "
                "expected both or neither, the weight below 1"
            )

    @property
    def variant(self) -> str:
        """Return the name in `SCORERS` under which this scorer is registered for this mode."""
        return self.scorer if self.mode == "fix" else f"{self.scorer}@{self.mode}"


SOURCES: Mapping[str, SourceSpec] = {
    name: spec
    for names, spec in (
        ("hendrycks_math hendrycks_math:train_MATH-500:test math500", SourceSpec(scorer="math", wrong=-1.0)),
        ("hendrycks_math01", SourceSpec(scorer="math")),
        ("amc23 aime2024 aime2025", SourceSpec(scorer="strict", wrong=-1.0)),
        ("gpqa", SourceSpec(scorer="letters")),
        ("codecontests apps codeforces taco", SourceSpec(scorer="code", wrong=-1.0)),
        ("openai_humaneval openai/openai_humaneval evalplus/humanevalplus", SourceSpec(scorer="code/humaneval")),
        ("newfacade/LeetCodeDataset", SourceSpec(scorer="code/humaneval")),
        ("mbpp google-research-datasets/mbpp", SourceSpec(scorer="code/mbpp")),
        ("KodCode/KodCode-V1", SourceSpec(scorer="code/kodcode")),
        ("codeparrot/apps BAAI/TACO", SourceSpec(scorer="code/apps")),
        ("deepmind/code_contests", SourceSpec(scorer="code/code_contests")),
        ("livecodebench agentica-org/DeepCoder-Preview-Dataset", SourceSpec(scorer="code/livecodebench")),
        ("hiyouga/geometry3k", SourceSpec(scorer="math")),
        ("lighteval/MATH DigitalLearningGmbH/MATH-lighteval HuggingFaceH4/MATH-500", SourceSpec(scorer="strict")),
        ("math_dapo math_dapo_reasoning", SourceSpec(scorer="answer_line", wrong=-1.0)),
        (
            "numina_aops_forum numina_synthetic_math numina_amc_aime numina_synthetic_amc numina_cn_k12 "
            "numina_olympiads",
            SourceSpec(scorer="math"),
        ),
        ("megarl/arithmetic", SourceSpec(scorer="math/last_number")),
        ("countdown", SourceSpec(scorer="megarl/countdown")),
        ("nq triviaqa popqa hotpotqa 2wikimultihopqa musique bamboogle", SourceSpec(scorer="short_answer")),
        ("luffy/1", SourceSpec(scorer="luffy/1", wrong=-0.5, malformed=-1.0)),
    )
    for name in names.split()
}


def source_spec(data_source: str, **changes: Any) -> SourceSpec:
    """Return the specification of a data source, with `changes` of its fields.

    A scorer's name can also be used as a data source, with rewards 1 and 0. With a change of `scorer`, the other fields
    start from that scorer's specification. ConfigError for an unknown data source or scorer lists the known names.
    """
    name = changes.get("scorer", data_source)
    if name not in SOURCES and name not in SCORERS:
        names = {*SOURCES, *(scorer for scorer in SCORERS if "@" not in scorer)}
        if "scorer" in changes:
            raise unknown_name("scorer", name, names, key=f"rewards.sources.{data_source}.scorer")
        error = unknown_name("data source", name, names, key="data_source")
        remedy = "For one of your own, name a scorer in rewards.sources, or a function in rewards.custom"
        raise ConfigError(f"{error}. {remedy}")
    others = {field: value for field, value in changes.items() if field != "scorer"}
    spec = replace(SOURCES[name] if name in SOURCES else SourceSpec(scorer=name), **others)
    SCORERS.get(spec.variant)
    return spec


def score(
    data_source: str,
    response: str,
    ground_truth: str,
    extra_info: Mapping[str, object],
    *,
    source: SourceSpec | None = None,
    arguments: Mapping[str, object] | None = None,
) -> Reward:
    """Score a response as `source` specifies, or without it by the data source's entry in `SOURCES`.

    `arguments` are passed on to the scorer. `details["parse_failed"]` is 1 if no answer could be parsed. Raises
    ConfigError for an unknown `data_source`, and DataError for a malformed ground truth.
    """
    spec = source_spec(data_source) if source is None else source
    scorer = SCORERS.get(spec.variant)
    rewards = [scorer(response, truth, extra_info, **(arguments or {})) for truth in _read(scorer.truths, ground_truth)]
    best = max(rewards, key=lambda r: (r.score, -r.details.get(PARSE_FAILED, 0.0))) if len(rewards) > 1 else rewards[0]
    failed = best.details.get(PARSE_FAILED, 0.0) == 1.0
    well_formed = spec.format is not None and FORMATS.get(spec.format)(response)
    details = {**best.details, **({} if spec.format is None else {"format": float(well_formed)})}
    if failed and not well_formed and spec.malformed is not None:
        return Reward(score=spec.malformed, correct=False, details=details, own_score=best.score)
    share = (1.0 - spec.format_weight) * best.score + spec.format_weight * well_formed
    total = spec.wrong + (spec.correct - spec.wrong) * share
    return Reward(score=total, correct=best.correct, details=details, own_score=best.score)


@lru_cache(maxsize=4096)
def _read(truths: TruthReader, ground_truth: str) -> tuple[str, ...]:
    """Read a ground truth, which all responses to a prompt share."""
    return tuple(truths(ground_truth))


def judge_by_source(
    response: str,
    ground_truth: str,
    extra_info: Mapping[str, object],
    *,
    data_source: str,
    source: SourceSpec,
    arguments: Mapping[str, object],
) -> Reward:
    """Call `score` for one response. Workers of the verifier pool import this function by name."""
    return score(data_source, response, ground_truth, extra_info, source=source, arguments=arguments)
