"""Try users' functions on a few answers before a run starts, so that mistakes in them cost nothing."""

from collections.abc import Iterable
from contextlib import closing

from megarl.errors import ConfigError
from megarl.host.streams import print_lines
from megarl.rewards.custom.functions import FAILURES, CustomFunctions, CustomSession
from megarl.rewards.question import Question, Verdict
from megarl.types import Prompt

# A right answer in the forms that functions look for.
_FORMS = "<think>\nSo be it.\n</think>\n<answer>\\boxed{TRUTH}</answer>\nThe answer is TRUTH\n#### TRUTH"


def try_functions(functions: CustomFunctions, prompts: Iterable[Prompt]) -> None:
    """Ask the functions about two answers to each prompt, the ground truth and an empty one.

    Raises ConfigError with the reason, and what the function printed, if an exception, a time-out or a crash leaves
    both answers to a prompt without a reward; with `on_error=raise`, also if it leaves one. Warns of functions that
    give every answer the same.
    """
    asked = [prompt for prompt in prompts if functions.of(prompt.data_source)]
    scores: dict[str, set[float | None]] = {}
    with closing(functions):
        pending = [_ask(functions, prompt, prompt.ground_truth, "") for prompt in asked]
        for prompt, judging in zip(asked, pending, strict=True):
            for name, by_row in functions.opinions([judging]).items():
                verdicts = list(by_row.values())
                scores.setdefault(name, set()).update(map(_score, verdicts))
                failed = [each for each in verdicts if each.outcome in FAILURES]
                if len(failed) == len(verdicts) or (failed and functions.cfg.on_error == "raise"):
                    raise ConfigError(
                        f"rewards.custom: the function {name} has no reward for {len(failed)} of {len(verdicts)} trial "
                        f"answers to prompt {prompt.uid} of {prompt.data_source!r} ({failed[0].outcome}): "
                        f"{failed[0].reason}; correct it, or skip the trial with rewards.custom.dry_run=false"
                        + (f"\nIt printed:\n{failed[0].output}" if failed[0].output else "")
                    )
        if flat := [name for name, found in scores.items() if len(found) == 1]:
            # It may want another form.
            again = [_ask(functions, prompt, _FORMS.replace("TRUTH", prompt.ground_truth)) for prompt in asked]
            for name, by_row in functions.opinions(again).items():
                scores[name].update(map(_score, by_row.values()))
        for name in flat:
            if len(scores[name]) == 1:
                print_lines(
                    f"warning: rewards.custom: the function {name} is flat: it gave {scores[name].pop()} for right and "
                    "empty answers alike, to the first prompt of each data source; check that it compares answers"
                )


def _score(verdict: Verdict) -> float | None:
    return None if verdict.reward is None else verdict.reward.score


def _ask(functions: CustomFunctions, prompt: Prompt, *responses: str) -> CustomSession:
    judging = functions.begin()
    for response in responses:
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
    return judging
