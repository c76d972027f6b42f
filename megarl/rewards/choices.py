"""Score letters of choices: find the letter that an answer states, and refuse answers that state two or deny it."""

import re
from collections.abc import Mapping
from functools import partial

from megarl.errors import DataError
from megarl.rewards.mathematics import reward_of_answer
from megarl.rewards.scorers import IN_BOX, SCORERS, Scorer
from megarl.types import Reward
from megarl_answers import MODES, AnswerOptions, Equality, after_thoughts, extract_answer, normalise
from megarl_answers.choices import stated_choice, stated_letter

_LETTER = re.compile(r"[A-Za-z]")


def compare_letters(answer: str, gold: str, options: AnswerOptions) -> Equality:
    """Compare multiple-choice letters, each standing alone or before the text of its choice.

    An answer with a second letter, or with words that deny the first one, states none. The modes `doc` and `ref` use
    the first letter of any word.
    """
    if options.textual:
        letter = _LETTER.search(normalise(answer))
        return Equality.UNPARSED if letter is None else Equality.of(letter[0].upper() == gold.upper())
    stated = stated_letter(answer)
    return Equality.UNPARSED if stated is None else Equality.of(stated == gold.upper())


def score_letters(
    response: str, ground_truth: str, extra_info: Mapping[str, object], *, options: AnswerOptions
) -> Reward:
    """Score 1 if the response states the letter of the right choice, else 0.

    Without a box and "the answer is", the last line or sentence that states one counts. Raises DataError for a ground
    truth without a letter, or with several.
    """
    letters: list[str] = _LETTER.findall(ground_truth)
    if len(letters) != 1:
        raise DataError(f"ground truth {ground_truth[:60]!r}: expected one letter of a choice, such as 'B'")
    answer = extract_answer(response, options)
    if answer is None and not options.textual:
        answer = stated_choice(after_thoughts(response))
    return reward_of_answer(answer, letters[0], compare_letters, options)


for _mode, _options in MODES.items():
    _scorer: Scorer = partial(score_letters, options=_options)
    SCORERS.register("letters" if _mode == "fix" else f"letters@{_mode}", **IN_BOX)(_scorer)
