"""Ask judges about one prompt before a run starts, so that mistakes in their settings cost nothing."""

from megarl.errors import ConfigError, RunError
from megarl.rewards.llm.judge import LlmJudge
from megarl.types import FinishReason, Prompt, Sample, prompt_segment
from megarl.types.judged import FinishedSample


def try_judge(judge: LlmJudge, prompt: Prompt) -> None:
    """Ask a judge about the ground truth as the answer to a prompt, and compare it with an empty one in pairwise mode.

    Raises ConfigError with the reason, and what the judge wrote, if there is no verdict.
    """
    judging = judge.begin()
    for index, response in enumerate(("", prompt.ground_truth)[-1 if judge.cfg.mode == "pointwise" else 0 :]):
        sample = Sample(
            uid=prompt.uid,
            sample_index=index,
            seed=0,
            segments=(prompt_segment(prompt.token_ids),),
            finish_reason=FinishReason.STOP,
        )
        text = "\n".join(message.content for message in prompt.messages)
        judging.add(FinishedSample(prompt=prompt, sample=sample, prompt_text=text, response=response))
    where = f"rewards.judges.{judge.section}: a trial"
    skip = f"or skip it with rewards.judges.{judge.section}.dry_run=false"
    try:
        troubles = judge.finish([judging]).troubles
    except RunError as error:
        raise ConfigError(f"{where} failed: {error}; {skip}") from error
    for trouble in troubles[:1]:
        said = f"\nIt wrote:\n{trouble.output}" if trouble.output else ""
        raise ConfigError(
            f"{where} with prompt {prompt.uid} gave no verdict: {trouble.reason}; correct the settings, {skip}{said}"
        )
