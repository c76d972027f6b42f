"""Reward programs in responses by running them against the tests of their problems."""

from megarl.rewards.code.scorer import CodeOptions, Credit, score_code

__all__ = ["CodeOptions", "Credit", "score_code"]
