"""Score responses as the reward versions 0 to 4 of LUFFY do (arXiv:2504.14945)."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from megarl.rewards.mathematics import compare_either, gold_answer, reward_of_answer, score_math_verify
from megarl.rewards.scorers import IN_BOX, SCORERS, Scorer, reward_of
from megarl.types import Reward
from megarl_answers import MODES, after_thoughts, last_boxed


@dataclass(frozen=True, slots=True, kw_only=True)
class LuffyVersion:
    """A version of the reward: how answers are compared, and whether thoughts must come first.

    needs_thinking: `</think>` must end the thoughts that the prompt opened, and only the text after it counts.
    """

    needs_thinking: bool
    judge: Literal["boxed", "math_verify"]


# Version 1 differs from version 0 only in its reward values, which `SOURCES` holds.
LUFFY_VERSIONS: Mapping[int, LuffyVersion] = {
    0: LuffyVersion(needs_thinking=True, judge="boxed"),
    1: LuffyVersion(needs_thinking=True, judge="boxed"),
    2: LuffyVersion(needs_thinking=False, judge="boxed"),
    3: LuffyVersion(needs_thinking=True, judge="math_verify"),
    4: LuffyVersion(needs_thinking=False, judge="math_verify"),
}


def score_luffy(response: str, ground_truth: str, extra_info: Mapping[str, object], *, version: LuffyVersion) -> Reward:
    """Score 1 if the answer after the thoughts equals the ground truth, else 0, comparing as the LUFFY version says."""
    gold = gold_answer(ground_truth)
    if version.needs_thinking and "</think>" not in response:
        return reward_of(False, parse_failed=True)
    solution = after_thoughts(response)
    if version.judge == "math_verify":
        return score_math_verify(solution, gold, extra_info)
    return reward_of_answer(last_boxed(solution, MODES["fix"]), gold, compare_either, MODES["fix"])


for _number, _version in LUFFY_VERSIONS.items():
    _scorer: Scorer = partial(score_luffy, version=_version)
    SCORERS.register(f"luffy/{_number}", **IN_BOX)(_scorer)
