"""Number the turns of a sample's conversation, and tell rows which turn follows which."""

import numpy as np

from megarl.types import FloatArray, Sample, SegmentSource
from megarl.types.turns import AFTER, FIRST_TRY, TURN, turn_places

GIVEN = (SegmentSource.PROMPT, SegmentSource.ENVIRONMENT)


def segment_turns(sample: Sample) -> list[int]:
    """Return the number of the turn that each segment is of, -1 for the prompt and for replies."""
    turn, found = 0, []
    for segment in sample.segments:
        turn += segment.source is SegmentSource.ENVIRONMENT
        found.append(-1 if segment.source in GIVEN else turn)
    return found


def turn_quantities(sample: Sample) -> dict[str, FloatArray]:
    """Return, for each response token, its turn, the turn that this follows, and the first of the tries beside it.

    All are -1 on tokens that are in no turn.
    """
    turns = segment_turns(sample)
    tries = () if sample.episode is None else sample.episode.tries
    places = turn_places(max(turns) + 1, tries)
    of_segments = [(turn, *places[turn]) if turn >= 0 else (-1, -1, -1) for turn in turns[1:]]
    columns = np.array(of_segments, np.float32).reshape(-1, 3)
    lengths = [len(segment.token_ids) for segment in sample.segments[1:]]
    return dict(zip((TURN, AFTER, FIRST_TRY), np.repeat(columns, lengths, axis=0).T, strict=True))
