"""Check before a run starts that each ground truth is accepted as an answer to itself, so that no run trains on data
that nobody can answer."""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence

from megarl.errors import DataError
from megarl.rewards.scorers import FORMATS, SCORERS
from megarl.rewards.sources import SourceSpec, score
from megarl.rewards.truths import any_mathematics, stated_in, without_stop
from megarl.types import Prompt
from megarl_answers.statement import last_number

SHOWN = 3
# Empty fields of tables become one of these as text.
_EMPTY = frozenset({"", "none", "null", "nan", "n/a", "boxed", "[]", '"target":[]'})

_NUMBER = re.compile(r"\d[\d.,]*")
_ORDINAL = re.compile(r"(?:the\s+)?(\d+)(?:st|nd|rd|th)", re.IGNORECASE)
# Two numbers or one with a decimal comma; and commas that only lists have.
_COMMA = re.compile(r"[-+]?(?:0,\d+|\d+,(?!\d{3}$)\d+)")
_LISTED = re.compile(r",\D|\D,|,\d{1,2},|[(\[{].*,")
# A letter with words; and nothing but words, numbers and signs that may stand between them.
_CHOICE = re.compile(r"(?:option|choice)\s+\(?([A-Z])\W*|\(?([A-Z])[).:](?:\s*\w.*)?", re.IGNORECASE)
_PROSE = re.compile(r"(?:\\text\w*|\\[()\[\],;! ]|[^\W\d_]{2,}|[^\W\d_]?'[a-z]+|\b[aAI]\b|[^\w\\<>|^&\[\]]|\d)+")


def is_empty(ground_truth: str) -> bool:
    r"""Return whether a ground truth says nothing: blank, `None`, `$$`, `\boxed{}`, an empty list of answers."""
    plain = "".join(c for c in ground_truth if c not in "\\{}$*. \t\r\n")
    return plain.casefold() in _EMPTY


def alone(answer: str) -> str | None:
    """Return the letter or number that an answer states in words, None for other answers."""
    if letter := _CHOICE.fullmatch(answer):
        return letter[1] or letter[2]
    if ordinal := _ORDINAL.fullmatch(answer):
        return ordinal[1]
    is_prose = _PROSE.fullmatch(answer) and (answer.count("=") == 1 or len(_NUMBER.findall(answer)) == 1)
    return last_number(answer) if is_prose else None


def spread_rows(num_rows: int, limit: int) -> frozenset[int]:
    """Return the indices of at most `limit` rows at equal distances, among them the first."""
    num = min(num_rows, limit)
    return frozenset(index * num_rows // num for index in range(num))


def check_own_answers(prompts: Sequence[tuple[str, Prompt, SourceSpec]], max_unscorable: float) -> str:
    """Judge the ground truth of each prompt, which is named for messages, as an answer to itself.

    Returns a warning that says which share of them scores as wrong or is empty, with examples; "" if none does. `0,5`
    counts as wrong unless other ground truths of its data source show that commas part answers. Raises DataError if
    this share is above `max_unscorable` for any data source, or if a ground truth is malformed.
    """
    judged: Counter[str] = Counter()
    failed: defaultdict[str, list[str]] = defaultdict(list)
    commas: defaultdict[str, list[str]] = defaultdict(list)
    with_lists = set[str]()
    for where, prompt, spec in prompts:
        judged[prompt.data_source] += 1
        empty = spec.scorer.removeprefix("format/") not in FORMATS and is_empty(prompt.ground_truth)
        if empty or not _is_right(prompt, spec):
            failed[prompt.data_source].append(f"{where}: {prompt.ground_truth[:60]!r}")
        elif "," in prompt.ground_truth and SCORERS.get(spec.variant).truths is any_mathematics:
            if _COMMA.fullmatch(prompt.ground_truth.strip("$ ")):
                commas[prompt.data_source].append(f"{where}: {prompt.ground_truth[:60]!r}")
            elif _LISTED.search(prompt.ground_truth):
                with_lists.add(prompt.data_source)
    for source in commas.keys() - with_lists:
        failed[source] += commas[source]
    for source, found in failed.items():
        share = len(found) / judged[source]
        if share > max_unscorable:
            raise DataError(
                f"ground truths of {source!r}: {len(found)} of {judged[source]} ({share:.1%}) are empty or, as answers,"
                f" judged wrong ({'; '.join(found[:SHOWN])}), expected at most {max_unscorable:.1%}; correct the data "
                "(a decimal comma 0,5 to 0.5, two answers to 0, 5), choose another scorer in rewards.sources, or "
                "raise rewards.ground_truths.max_unscorable"
            )
    if not failed:
        return ""
    total = sum(map(len, failed.values()))
    examples = [text for found in failed.values() for text in found][:SHOWN]
    return f"warning: ground truths: {total} of {len(prompts)} ({total / len(prompts):.2%}) cannot be scored" + "".join(
        f"\n  {text}" for text in examples
    )


def _is_right(prompt: Prompt, spec: SourceSpec) -> bool:
    """Return whether every answer that a ground truth stands for is right, and the text of one as it is in the file.

    If it is a sentence that states a number or a letter, these are right too.
    """
    scorer, truth = SCORERS.get(spec.variant), prompt.ground_truth
    answers = scorer.truths(truth, prompt.label)
    plain = [] if truth.startswith(("[", "{")) or stated_in(truth) else [without_stop(truth)]
    if scorer.truths is any_mathematics:
        plain += [found for answer in answers if (found := alone(answer))]
    return scorer.states is None or all(
        score(prompt.data_source, scorer.states(answer), truth, prompt.extra_info, source=spec).correct
        for answer in dict.fromkeys([*plain, *answers])
    )
