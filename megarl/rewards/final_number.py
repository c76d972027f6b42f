"""Score the number that stands after `####` at the end of a response, as in the solutions of GSM8K."""

import re
from collections.abc import Mapping
from fractions import Fraction

from megarl.errors import DataError
from megarl.rewards.scorers import AFTER_MARK, SCORERS, reward_of
from megarl.types import Reward
from megarl_answers.spelling import canonical
from megarl_answers.statement import AGAIN, plain_answer
from megarl_answers.units import parse_quantity

SEARCH_CHARS = 300  # the answer stands at the end; a bounded search stays quick on any text
_MARK = "####"
# Around an answer, these say nothing: Markdown, and tags that end a text.
_AROUND = re.compile(r"[✅✔☑\ufe0f]|\*{2,3}|__|`|<\|?/?[a-zA-Z_]+\|?>")
_GLUED_UNIT = re.compile(r"(?<=\d)(?=[mghls]\W*$)")
_ABOUT = re.compile(r"[\s*_`$=]*~(?!~)")
_NAMED = re.compile(r"^[a-zA-Z]\s*=\s*(?=[^=]*$)")


def normalise_number(text: str) -> str:
    """Unify the spelling of a number: `$1,234.00` → `1234`, `.5` → `0.5`, `18.` → `18`."""
    text = re.sub(r"\.0*$", "", re.sub(r"[,$\\]", "", text.strip()))
    return re.sub(r"^(?=\.)|(?<=^-)(?=\.)", "0", text)


def parse_stated(line: str) -> Fraction | None:
    """Parse a number with or without the words that name what it counts; None if the line says anything else."""
    if _ABOUT.match(line):
        return None
    values = set[Fraction | None]()
    for form in AGAIN.split(_AROUND.sub(" ", line)):
        text = re.sub(r"^-\s+", "-", _NAMED.sub("", canonical(_GLUED_UNIT.sub(" ", form))))
        quantity = parse_quantity(_NAMED.sub("", plain_answer(text)))
        values.add(quantity[0].value if quantity else None)
    return values.pop() if len(values) == 1 else None


@SCORERS.register("openai/gsm8k", **AFTER_MARK)
def score_gsm8k(response: str, ground_truth: str, extra_info: Mapping[str, object]) -> Reward:
    """Score 1 if the line after the last `####` in the last 300 characters is a number with the value of the ground
    truth, else 0.

    `####18`, `#### **18**`, `#### $18.00` and `#### 18 apples` are 18; `18 or 19` and `18 and a half` are not numbers.
    Raises DataError for a ground truth that is not a number.
    """
    plain = normalise_number(ground_truth)
    if not re.fullmatch(r"-?[0-9]+(?:\.[0-9]+)?(?:e[+-][0-9]+)?", plain):
        raise DataError(f"ground truth {ground_truth[:60]!r}: expected a number; score other answers as scorer=math")
    stated = [part.strip() for part in response[-SEARCH_CHARS:].split(_MARK)[1:]]
    line = next((part.partition("\n")[0] for part in reversed(stated) if part.strip("#")), "")
    number = parse_stated(line)
    return reward_of(number == Fraction(plain), parse_failed=number is None)
