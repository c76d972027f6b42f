"""Estimate accuracy by data file and data source from judged answers."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megarl.report.statistics import spread_of
from megarl.types import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One judged answer: a row of samples.parquet. A prompt has one `greedy` answer and several sampled ones.

    data: the data file, named by the shortest ending of its path that tells it from the others.
    """

    data: str
    data_source: str
    uid: str
    sample_index: int
    greedy: bool
    prompt: str
    response: str
    ground_truth: str
    reward: float
    correct: bool
    finish_reason: str
    num_response_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceResult:
    """The results on one data source of one file.

    avg: share of correct answers among `num_samples` per prompt, mean over prompts (avg@n). avg_std_error: its standard
    error over prompts, sd / √num_prompts; None for a single prompt. pass_at: k → pass@k, mean over prompts. greedy:
    accuracy of greedy answers. reward, response_tokens, truncated_frac: means over sampled answers.
    """

    data: str
    data_source: str
    num_prompts: int
    num_samples: int
    avg: float
    avg_std_error: float | None
    pass_at: Mapping[int, float]
    greedy: float
    reward: float
    response_tokens: float
    truncated_frac: float


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Estimate, without bias, the probability that at least one of k answers is correct.

    From n answers of which c are correct: 1 − C(n − c, k) / C(n, k) (arXiv:2107.03374).
    """
    if not 0 <= num_correct <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} of {num_correct} correct answers among {num_samples}: expected 1 <= k <= n, c <= n")
    return 1 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def results_by_source(answers: Sequence[Answer], ks: Sequence[int]) -> list[SourceResult]:
    """Compute a result for each data source of each file, sorted by name.

    Each prompt has the same number of sampled answers and one greedy one.
    """
    by_source: dict[tuple[str, str], list[Answer]] = defaultdict(list)
    for answer in answers:
        by_source[answer.data, answer.data_source].append(answer)
    return [_result(data, source, by_source[data, source], ks) for data, source in sorted(by_source)]


def _result(data: str, source: str, answers: Sequence[Answer], ks: Sequence[int]) -> SourceResult:
    sampled = [answer for answer in answers if not answer.greedy]
    by_prompt: dict[str, list[Answer]] = defaultdict(list)
    for answer in sampled:
        by_prompt[answer.uid].append(answer)
    (num_samples,) = {len(group) for group in by_prompt.values()}
    num_correct = [sum(answer.correct for answer in group) for group in by_prompt.values()]
    accuracy = spread_of([correct / num_samples for correct in num_correct])
    return SourceResult(
        data=data,
        data_source=source,
        num_prompts=len(by_prompt),
        num_samples=num_samples,
        avg=accuracy.mean,
        avg_std_error=None if accuracy.std is None else accuracy.std / math.sqrt(len(by_prompt)),
        pass_at={k: _mean([pass_at_k(num_samples, correct, k) for correct in num_correct]) for k in ks},
        greedy=_mean([float(answer.correct) for answer in answers if answer.greedy]),
        reward=_mean([answer.reward for answer in sampled]),
        response_tokens=_mean([float(answer.num_response_tokens) for answer in sampled]),
        truncated_frac=_mean([float(answer.finish_reason == FinishReason.LENGTH) for answer in sampled]),
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
