"""Check before a run starts that each ground truth is accepted as an answer to itself, so that no run trains on data
that nobody can answer."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

from megarl.errors import DataError
from megarl.rewards.scorers import FORMATS, accepted_answers
from megarl.rewards.sources import SourceSpec, score
from megarl.rewards.truths import truths_of
from megarl.types import Prompt

SHOWN = 3
# Empty fields of tables become one of these as text.
_EMPTY = frozenset({"", "none", "null", "nan", "n/a", "boxed", "[]", '"target":[]'})


_in_box = r"</think>\boxed{{{}}}".format
# How a response states a ground truth, by scorer. Others want more than an answer, such as a program.
STATED: Mapping[str, Callable[[str], str]] = {
    **dict.fromkeys(("math", "math/last_number", "strict", "letters", "math_verify"), _in_box),
    **dict.fromkeys((f"luffy/{version}" for version in range(5)), _in_box),
    "answer_line": "Answer: {}".format,
    "short_answer": lambda ground_truth: f"<answer>{accepted_answers(ground_truth)[0]}</answer>",
    "openai/gsm8k": "#### {}".format,
    "megarl/sums": "#### {}".format,
    "megarl/calculator": "#### {}".format,
}


def is_empty(ground_truth: str) -> bool:
    r"""Return whether a ground truth says nothing: blank, `None`, `$$`, `\boxed{}`, an empty list of answers."""
    plain = "".join(c for c in ground_truth if c not in "\\{}$*. \t\r\n")
    return plain.casefold() in _EMPTY


def spread_rows(num_rows: int, limit: int) -> frozenset[int]:
    """Return the indices of at most `limit` rows at equal distances, among them the first."""
    num = min(num_rows, limit)
    return frozenset(index * num_rows // num for index in range(num))


def check_own_answers(prompts: Sequence[tuple[Prompt, SourceSpec]], max_unscorable: float) -> str:
    """Judge the ground truth of each prompt as an answer to itself.

    Returns a warning that says which share of them scores as wrong or is empty, with examples; "" if none does. Raises
    DataError if this share is above `max_unscorable` for any data source, or if a ground truth is malformed.
    """
    judged: Counter[str] = Counter()
    failed: defaultdict[str, list[str]] = defaultdict(list)
    for prompt, spec in prompts:
        state = STATED.get(spec.scorer)
        judged[prompt.data_source] += 1
        empty = spec.scorer.removeprefix("format/") not in FORMATS and is_empty(prompt.ground_truth)
        truth, extra = prompt.ground_truth, prompt.extra_info
        if empty or (
            state is not None
            and not score(
                prompt.data_source, state(truths_of(spec.scorer, truth)[0]), truth, extra, source=spec
            ).correct
        ):
            failed[prompt.data_source].append(f"{prompt.uid}: {prompt.ground_truth[:60]!r}")
    for source, found in failed.items():
        share = len(found) / judged[source]
        if share > max_unscorable:
            raise DataError(
                f"ground truths of {source!r}: {len(found)} of {judged[source]} ({share:.1%}) are empty or, as answers,"
                f" judged wrong ({'; '.join(found[:SHOWN])}), expected at most {max_unscorable:.1%}; correct the "
                "data, choose another scorer in rewards.sources, or raise rewards.ground_truths.max_unscorable"
            )
    if not failed:
        return ""
    total = sum(map(len, failed.values()))
    examples = [text for found in failed.values() for text in found][:SHOWN]
    return f"warning: ground truths: {total} of {len(prompts)} ({total / len(prompts):.2%}) cannot be scored" + "".join(
        f"\n  {text}" for text in examples
    )
