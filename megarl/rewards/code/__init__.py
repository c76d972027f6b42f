"""Rewards of programs: the code of a response is run against the tests of its problem, in a sandbox."""

from megarl.rewards.code.options import CodeOptions, Credit
from megarl.rewards.code.scorer import score_code

__all__ = ["CodeOptions", "Credit", "score_code"]
