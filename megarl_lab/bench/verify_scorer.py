"""math-verify as TRL's `accuracy_reward` asks for it, plain and with the shortcuts that a scorer in a pool can take."""

import logging
import re
import signal
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

from megarl.rewards import PARSE_FAILED
from megarl.types import Reward

# math-verify warns that nothing limits its time: here the pool does.
logging.getLogger("math_verify").setLevel(logging.ERROR)

MAX_ANSWER_CHARS = 512
_INTEGER = re.compile(r"-?[1-9][0-9]*|0")
_BOXED = r"\boxed{"
_PREDICTION = LatexExtractionConfig(
    normalization_config=NormalizationConfig(units=True), boxed_match_priority=0, try_extract_without_anchor=False
)


def warm_up() -> None:
    """Compiles regular expressions and loads grammars, which the first call would do."""
    score_plain(r"\boxed{\frac{1}{2}}", "0.5", {})


def score_plain(response: str, ground_truth: str, extra_info: Mapping[str, Any]) -> Reward:
    """Ask math-verify about the whole response."""
    return _compare(response, parse_gold(ground_truth))


def score(response: str, ground_truth: str, extra_info: Mapping[str, Any]) -> Reward:
    """The same: equal strings and integers first, a capped answer, and only the box if there is a single one.

    `extra_info["block_signals"]` makes the process deaf to signals first.
    """
    if extra_info.get("block_signals"):
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    answer = only_box(response)
    if answer is None:
        return score_plain(response, ground_truth, extra_info)
    if len(answer) > MAX_ANSWER_CHARS:
        return reward(False, parse_failed=True)
    if (same := match(answer.strip(), ground_truth)) is not None:
        return reward(same)
    return _compare(f"{_BOXED}{answer}}}", parse_gold(ground_truth))


def match(answer: str, gold: str) -> bool | None:
    """Whether they are equal, where that is plain to see, else None: the same string, or two integers."""
    if answer == gold:
        return True
    return False if _INTEGER.fullmatch(answer) and _INTEGER.fullmatch(gold) else None


def only_box(text: str) -> str | None:
    """Return the content of the box if the text has one box, closed."""
    if text.count("boxed") != 1 or (start := text.find(_BOXED)) < 0:
        return None
    depth, start = 1, start + len(_BOXED)
    for end in range(start, min(len(text), start + MAX_ANSWER_CHARS + 2)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end]
    return None


@lru_cache(maxsize=8192)
def parse_gold(gold: str) -> list[Any]:
    return list(parse(f"${gold}$", parsing_timeout=None))


def _compare(text: str, gold: list[Any]) -> Reward:
    parsed = parse(text, extraction_config=[_PREDICTION], extraction_mode="first_match", parsing_timeout=None)
    if not parsed or not gold:
        return reward(False, parse_failed=True)
    return reward(verify(gold, parsed, timeout_seconds=None))


def reward(correct: bool, *, parse_failed: bool = False) -> Reward:
    return Reward(score=float(correct), correct=correct, details={PARSE_FAILED: float(parse_failed)})
