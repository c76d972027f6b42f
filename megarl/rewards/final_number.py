"""Answers that end in `#### number`."""

import re
from collections.abc import Mapping
from typing import Any

from megarl.rewards.registry import SCORERS, reward_of
from megarl.types import Reward

SEARCH_CHARS = 300  # the answer stands at the end; a bounded search stays quick on any text
_MARK = "#### "
_ANSWER = re.compile(_MARK + r"(-?\$?[.,]*[0-9][0-9.,]*)")


def normalise_number(text: str) -> str:
    """`$1,234.00` → `1234`, `.5` → `0.5`, `18.` → `18`."""
    text = text.strip().replace(",", "").replace("$", "")
    text = re.sub(r"\.0*$", "", text)
    return re.sub(r"^(-?)\.", r"\g<1>0.", text)


@SCORERS.register("openai/gsm8k")
def score_gsm8k(response: str, ground_truth: str, extra_info: Mapping[str, Any]) -> Reward:
    """1 if the last `#### number` in the last 300 characters equals the ground truth as text, else 0."""
    found = _ANSWER.findall(response[-SEARCH_CHARS:])
    correct = bool(found) and normalise_number(found[-1]) == normalise_number(ground_truth)
    return reward_of(correct, parse_failed=not found)


@SCORERS.register("megarl/sums")
def score_sums(response: str, ground_truth: str, extra_info: Mapping[str, Any]) -> Reward:
    """1 if the response ends in `#### ` and the ground truth, and has no other `####`, else 0."""
    before, mark, number = response.rpartition(_MARK)
    well_formed = bool(mark) and _MARK.strip() not in before and re.fullmatch("[0-9]+", number) is not None
    return reward_of(well_formed and number == ground_truth, parse_failed=not well_formed)
