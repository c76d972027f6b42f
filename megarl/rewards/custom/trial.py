"""Try users' functions on a few answers before a run starts, so that mistakes in them cost nothing."""

from collections.abc import Iterable
from contextlib import closing

from megarl.errors import ConfigError
from megarl.rewards.custom.functions import FAILURES, CustomFunctions
from megarl.rewards.question import Question
from megarl.types import Prompt


def try_functions(functions: CustomFunctions, prompts: Iterable[Prompt]) -> None:
    """Ask the functions about two answers to each prompt, the ground truth and an empty one.

    Raises ConfigError with the reason, and what the function printed, if an exception, a time-out or a crash leaves
    both answers to a prompt without a reward; with `on_error=raise`, also if it leaves one.
    """
    asked = [prompt for prompt in prompts if functions.of(prompt.data_source)]
    with closing(functions):
        pending = []
        for prompt in asked:
            judging = functions.begin()
            for response in (prompt.ground_truth, ""):
                judging.add(
                    Question(
                        data_source=prompt.data_source,
                        # Only the run's tokenizer could render the messages by its chat template.
                        prompt="\n".join(message.content for message in prompt.messages),
                        response=response,
                        ground_truth=prompt.ground_truth,
                        extra_info=prompt.extra_info,
                        messages=prompt.messages,
                        group=prompt.uid,
                        label=prompt.label,
                        is_text=prompt.is_text,
                    )
                )
            pending.append(judging)
        for prompt, judging in zip(asked, pending, strict=True):
            for name, by_row in functions.opinions([judging]).items():
                verdicts = list(by_row.values())
                failed = [each for each in verdicts if each.outcome in FAILURES]
                if len(failed) == len(verdicts) or (failed and functions.cfg.on_error == "raise"):
                    raise ConfigError(
                        f"rewards.custom: the function {name} has no reward for {len(failed)} of {len(verdicts)} trial "
                        f"answers to prompt {prompt.uid} of {prompt.data_source!r} ({failed[0].outcome}): "
                        f"{failed[0].reason}; correct it, or skip the trial with rewards.custom.dry_run=false"
                        + (f"\nIt printed:\n{failed[0].output}" if failed[0].output else "")
                    )
