"""Choose which checkpoints a run keeps: the last ones, and the best by their validation scores."""

import json
from collections.abc import Mapping
from pathlib import Path

from megarl.record.metrics import MARKER, STATE_FILE

# The score of a checkpoint that was complete before its step was validated; not one of the files that its marker lists.
LATE_SCORE = f"{MARKER}.score"


def score_of(path: Path) -> float | None:
    """Return the score of a checkpoint, None also if its state cannot be read: that must not end a run."""
    try:
        late = path / LATE_SCORE
        file = late if late.exists() else path / STATE_FILE
        score: float | None = json.loads(file.read_bytes())["score"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return score


def _measure(path: Path) -> str:
    """Return what the score of a checkpoint measures: a resumed run may validate in another way."""
    try:
        config = json.loads((path / STATE_FILE).read_bytes())["config"]
        when = {"every_steps": 0, "stop_after_zeros": None}
        return json.dumps([config["checkpoint"]["best_metric"], {**config["validation"], **when}], sort_keys=True)
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def steps_to_keep(
    scores: Mapping[int, float | None], *, keep_last: int, keep_best: int, measures: Mapping[int, str] | None = None
) -> set[int]:
    """Return the last `keep_last` steps and the `keep_best` steps of highest score; ties go to the earlier step.

    measures: what each score measures; the best are those of each measure. None: all the same.
    """
    kept, best = {*sorted(scores)[-keep_last:]}, dict[str, list[int]]()
    for _, step in sorted((-score, step) for step, score in scores.items() if score is not None):
        best.setdefault(measures[step] if measures else "", []).append(step)
    return kept.union(*(steps[:keep_best] for steps in best.values()))


def superfluous(complete: Mapping[int, Path], *, keep_last: int, keep_best: int) -> list[Path]:
    """List the complete checkpoints, by step, that are not to be kept; see `steps_to_keep`."""
    scores = {step: score_of(path) for step, path in complete.items()}
    measures = {step: _measure(path) for step, path in complete.items()}
    kept = steps_to_keep(scores, keep_last=keep_last, keep_best=keep_best, measures=measures)
    return [complete[step] for step in sorted(complete.keys() - kept)]
