"""A scorer that asks math-verify about the whole response, without a cap, a shortcut or a limit of time."""

import logging
from collections.abc import Mapping
from typing import Any

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

from megarl.types import Reward

# It warns that nothing limits its time: the pool does.
logging.getLogger("math_verify").setLevel(logging.ERROR)
_PREDICTION = LatexExtractionConfig(
    normalization_config=NormalizationConfig(units=True), boxed_match_priority=0, try_extract_without_anchor=False
)


def warm_up() -> None:
    """Compile regular expressions and load grammars, as the first call would."""
    score(r"\boxed{\frac{1}{2}}", "0.5", {})


def score(response: str, ground_truth: str, extra_info: Mapping[str, Any]) -> Reward:
    gold = parse(f"${ground_truth}$", parsing_timeout=None)
    parsed = parse(response, extraction_config=[_PREDICTION], extraction_mode="first_match", parsing_timeout=None)
    correct = bool(parsed and gold) and verify(gold, parsed, timeout_seconds=None)
    return Reward(score=float(correct), correct=correct, details={"parse_failed": float(not parsed)})
