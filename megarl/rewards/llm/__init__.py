"""Judge samples by language models that write their verdicts: behind HTTP endpoints, or on engines of the run."""

from megarl.rewards.llm.endpoint import Completions, EndpointCompletions, JudgeCompletion, Request
from megarl.rewards.llm.judge import LlmJudge, try_judge

__all__ = ["Completions", "EndpointCompletions", "JudgeCompletion", "LlmJudge", "Request", "try_judge"]
