"""Judge samples by language models that write their verdicts: behind HTTP endpoints, or on engines of the run."""

from megarl.rewards.llm.completions import Completions, JudgeCompletion, Request
from megarl.rewards.llm.endpoint import EndpointCompletions
from megarl.rewards.llm.judge import LlmJudge
from megarl.rewards.llm.trial import try_judge

__all__ = ["Completions", "EndpointCompletions", "JudgeCompletion", "LlmJudge", "Request", "try_judge"]
