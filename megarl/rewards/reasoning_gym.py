"""Score answers to problems of reasoning-gym by the package's own functions."""

import ast
from collections.abc import Mapping

from megarl.config.optional import import_optional
from megarl.errors import DataError
from megarl.rewards.scorers import LAST_ANSWER, PARSE_FAILED, SCORERS
from megarl.types import Reward


@SCORERS.register("reasoning_gym", after_thoughts=True)
def score_reasoning_gym(response: str, ground_truth: str, extra_info: Mapping[str, object]) -> Reward:
    """Score the last `<answer>…</answer>` from 0 to 1 as the problem's dataset does; 1 is correct.

    `ground_truth` is the dataset's entry, as `megarl_lab.recipes.reasoning_gym` writes it. Raises DataError for any
    other, and ConfigError without the package.
    """
    factory = import_optional("reasoning_gym.factory", package="reasoning-gym", key="data_source=reasoning_gym")
    try:
        entry = ast.literal_eval(ground_truth)
        score_answer = factory.get_score_answer_fn(entry["metadata"]["source_dataset"])
    except (ValueError, SyntaxError, TypeError, KeyError) as error:
        raise DataError(
            f"ground truth {ground_truth[:60]!r}: expected an entry of reasoning-gym: {type(error).__name__}: {error}"
        ) from error
    answers = LAST_ANSWER.findall(response)
    score = float(score_answer(answers[-1].strip(), entry)) if answers else 0.0
    return Reward(score=min(1.0, max(0.0, score)), correct=score >= 1.0, details={PARSE_FAILED: float(not answers)})
