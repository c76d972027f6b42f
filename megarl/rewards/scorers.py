"""Register scorers by name, define those for simple forms of answers, as `<answer>…</answer>`, and say how each data
source is rewarded: which scorer judges it, and the rewards of correct and wrong answers.
"""

import math
import re
import string
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import lru_cache, partial
from typing import Any, Protocol

from megarl.errors import ConfigError, DataError
from megarl.registry import FunctionRegistry, Registry, unknown_name
from megarl.rewards.truths import TruthReader, any_answer, any_mathematics, as_it_stands
from megarl.types import Reward
from megarl_answers import Mode, after_thoughts, without_accents

# The key of `Reward.details` that is 1 if no answer could be parsed, which is counted separately from wrong answers.
PARSE_FAILED = "parse_failed"


class Scorer(Protocol):
    """A function that judges one response, from 0 (wrong) to 1 (right).

    A scorer accepts any text, and raises DataError for a malformed ground truth. Its caller limits its time.
    """

    def __call__(self, response: str, ground_truth: str, extra_info: Mapping[str, object]) -> Reward: ...


@dataclass(frozen=True, slots=True)
class RegisteredScorer:
    """A scorer, and what its registration declares: how it reads ground truths, and how a response states an answer.

    states: None if it wants more than an answer, such as a program. after_thoughts: whether it is given only what
    follows the last thought, if there is one.
    """

    scorer: Callable[..., Reward]
    _: KW_ONLY
    truths: TruthReader = as_it_stands
    states: Callable[[str], str] | None = None
    after_thoughts: bool = False

    def __call__(self, response: str, ground_truth: str, extra_info: Mapping[str, object], **arguments: Any) -> Reward:
        read = after_thoughts(response) if self.after_thoughts else response
        return self.scorer(read, ground_truth, extra_info, **arguments)


SCORERS: FunctionRegistry[Scorer, RegisteredScorer] = FunctionRegistry(
    "data source", key="data_source", entry=RegisteredScorer
)
# How scorers of mathematics and choices are registered.
IN_BOX: Mapping[str, Any] = {"truths": any_mathematics, "states": r"</think>\boxed{{{}}}".format}
AFTER_MARK: Mapping[str, Any] = {"truths": any_mathematics, "states": "#### {}".format, "after_thoughts": True}
FormatCheck = Callable[[str], bool]
FORMATS: Registry[FormatCheck] = Registry("response format", key="format")

_TAG = re.compile(r"</?(?:think|answer)>")
_THINK = ("<think>", "</think>")
_ANSWER = ("<answer>", "</answer>")
_MARK = "#### "
_MARKS = re.escape(string.punctuation)
# These stay: words, marks within a number but those of thousands, marks before it, a percent sign after it, as -5, 3.5
# and 1/2 are not 5, 35 and 12, and what belongs to a name: C++, C#, AB-, O'.
_KEPT = re.compile(
    rf"[^{_MARKS}]+|(?<=\d)(?!,\d{{3}}(?!\d))[{_MARKS}]+(?=\d)|(?<![^\s(])[-.<>]+(?=[\d.])|(?<=\d)%|(?<=[^\W_])(?:[+#]+|-+(?!\S)"
    r"|(?<=\b[^\W\d_])['*](?!\w))"
)
_QUOTED = re.compile(r"(['\"*_`](?<!\w.)['\"*_`]*)(?=\S)(.+?)(?<=\S)\1(?!\w)", re.DOTALL)
_SAID = re.compile(
    r"^[\s*_]*(?:(?:[Ii]t|[Tt]he (?:\w+ )?answer) (?:is|was)\b|(?i:(?:final )?answer)\W*?:)?[\s*_]*"
    r"(?:[Ii]n (?:the year )?(?=\d+\W*$))?"
)
# Before a word; a capital A is one only at the start, unlike that of `Vitamin A`.
_ARTICLE = re.compile(r"(?:\b(?:(?i:an|the)|a)|^A)\s+(?!(?i:an?|the)$)")
# Forms of Unicode's categories: dashes, quotation marks, other punctuation, and invisible characters.
_INDEX = re.compile("(?<=[A-Za-z)])[₀-₉]+")
_INVISIBLE = "\u200b"
_FORMS = {"Pd": "-", "Pi": "'", "Pf": "'", "Cf": _INVISIBLE, **dict.fromkeys(("Po", "Ps", "Pe", "Pc"), ",")}
# They part what they stand between in numbers.
_IN_NUMBER = re.compile(rf"(?<=[\d.]){_INVISIBLE}+(?=[\d.])")
LAST_ANSWER = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)


def reward_of(correct: bool, *, parse_failed: bool) -> Reward:
    """Return the reward 1 (correct) or 0 (wrong), and record in its details whether the answer could be parsed."""
    return Reward(score=float(correct), correct=correct, details={PARSE_FAILED: float(parse_failed)})


def has_format(response: str, *, tags: tuple[str, ...], ends_well: FormatCheck, opened: bool = False) -> bool:
    """Return whether a response starts with the first of `tags`, has exactly these tags in this order, and ends well.

    `ends_well` is called with the text after `</think>`. `opened`: the prompt ends with the first tag, which the
    response must then not repeat.
    """
    text = (tags[0] if opened else "") + response.strip()
    if not text.startswith(tags[0]) or tuple(_TAG.findall(text)) != tags:
        return False
    return ends_well(text.rpartition("</think>")[2].strip())


_FORMATS: Mapping[str, tuple[tuple[str, ...], FormatCheck]] = {
    "think": (_THINK, bool),
    "think_boxed": (_THINK, lambda text: "}" in text.partition(r"\boxed{")[2]),
    "think_answer": (
        _THINK + _ANSWER,
        lambda text: re.fullmatch(r"<answer>\s*\S.*</answer>", text, re.DOTALL) is not None,
    ),
}


def score_format(response: str, ground_truth: str, extra_info: Mapping[str, object], *, check: FormatCheck) -> Reward:
    """Score 1 if the response passes the format check, else 0; the ground truth is ignored."""
    well_formed = check(response)
    return reward_of(well_formed, parse_failed=not well_formed)


for _name, (_tags, _ends_well) in _FORMATS.items():
    FORMATS.register(_name)(partial(has_format, tags=_tags, ends_well=_ends_well))
    FORMATS.register(f"{_name}/opened")(partial(has_format, tags=_tags, ends_well=_ends_well, opened=True))
for _name in FORMATS:
    _scorer: Scorer = partial(score_format, check=FORMATS.get(_name))
    SCORERS.register(f"format/{_name}")(_scorer)


@SCORERS.register("short_answer", truths=any_answer, states="<answer>{}</answer>".format, after_thoughts=True)
def score_short_answer(response: str, ground_truth: str, extra_info: Mapping[str, object]) -> Reward:
    """Score 1 if the last `<answer>…</answer>` equals the ground truth, as Search-R1 compares them, else 0.

    Case, punctuation, articles (a, an, the), repeated spaces and Unicode's forms of a character do not count, but signs
    and points of numbers do, and signs that belong to a name.
    """
    if not (answers := LAST_ANSWER.findall(response)):
        return reward_of(False, parse_failed=True)
    last = answers[-1]
    correct = _same_words(last, ground_truth) or _same_words(_SAID.sub("", last), ground_truth)
    return reward_of(correct, parse_failed=False)


def _same_words(answer: str, accepted: str) -> bool:
    """Compare answers without case and punctuation, accents that the answer has nowhere, with articles or without."""
    left, right = _forms_of(answer), _forms_of(without_accents(accepted) if answer.isascii() else accepted)
    return left[1] == right[1] or left[2] == right[2] if right[1] else left[0] == right[0]


@lru_cache(maxsize=4096)
def _forms_of(text: str) -> tuple[str, str, str]:
    """Return a text without quotation marks around words, without punctuation and case, and without articles too."""
    if not text.isascii():
        # Unicode's composed form, with ASCII digits and marks, without invisible characters.
        text = _INDEX.sub(lambda index: unicodedata.normalize("NFKC", index[0]), text.replace("\u2212", "-"))
        text = _IN_NUMBER.sub(" ", "".join(map(_form_of, text)))
        text = unicodedata.normalize("NFC", text.replace(_INVISIBLE, ""))
    text = (_QUOTED.sub(r"\2", text) if _QUOTED.search(text) else text).strip()
    plain = " ".join("".join(_KEPT.findall(text)).split())
    return text, plain.casefold(), _ARTICLE.sub("", plain).casefold()


def _form_of(character: str) -> str:
    # Some mean something else in line: 10², ½.
    if character.isascii() or unicodedata.decomposition(character).startswith(("<super>", "<sub>", "<fraction>")):
        return character
    if character.isdecimal():
        return str(unicodedata.decimal(character))
    form = unicodedata.normalize("NFKC", character)
    return form if form.isascii() or len(form) > 1 else _FORMS.get(unicodedata.category(form), form)


@SCORERS.register("megarl/sums", "megarl/calculator", "megarl/squares", **AFTER_MARK)
def score_sums(response: str, ground_truth: str, extra_info: Mapping[str, object]) -> Reward:
    """Score 1 if the response ends in `#### ` and the ground truth, and has `####` nowhere else; otherwise 0.

    Raises DataError for a ground truth that begins with a needless zero.
    """
    if ground_truth.startswith("0") and ground_truth != "0":
        raise DataError(f"ground truth {ground_truth[:60]!r}: expected a whole number without zeros before it")
    before, mark, number = response.rpartition(_MARK)
    well_formed = bool(mark) and _MARK.strip() not in before and re.fullmatch("[0-9]+", number) is not None
    return reward_of(well_formed and number == ground_truth, parse_failed=not well_formed)


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
