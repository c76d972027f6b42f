"""Let the policy write several turns of a conversation at the same time, and lay them out as the tree that they make.

They are tries of one turn, or turns of several chats, such as those of sub-agents. Each has a seed of its own, by its
place among them, and reads nothing of the others, so it can be sampled again whichever of them was written first.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megarl.rollout.conversations import CUTS, episode_of, reading, untrained, with_facts
from megarl.types import Sample, environment_segment
from megarl.types.arrays import ExpertArray, with_unrouted
from megarl.types.episodes import EpisodeReply
from megarl.types.forks import Fork, path_before, path_to
from megarl.types.turns import Tries


def written_at_once(sample: Sample, reply: EpisodeReply, parts: Sequence[Sequence[Sample]]) -> Sample:
    """Return the sample with all turns that were written at the same time; `parts` has, for each of `asked_at_once`,
    that sample with each of its tries at the end.

    They stand in this order, each on a branch of its own, with an empty reply between the tries of a turn.
    """
    episode, num_segments, place = episode_of(sample), len(sample.segments), 0
    number, tries, chat = episode.num_turns, list(episode.tries), list(episode.chat)
    after = tries.pop().after if tries and tries[-1].first == number else number - 1
    for asked, tries_of_it in zip((reply, *reply.beside), parts, strict=True):
        if place:
            sample, after = reading(sample, asked), number - 1 if asked.after_turn is None else asked.after_turn
            chat += [] if asked.part is None else [asked.part]
        context_end = int(path_before(sample.num_tokens, sample.forks)[-1])
        for i, part in enumerate(tries_of_it):
            segments, forks = sample.segments, sample.forks
            if i:
                segments, forks = (*segments, environment_segment([])), (*forks, Fork(sample.num_tokens, context_end))
            own = (part.segments if asked.trains else untrained(part.segments))[num_segments + bool(place) :]
            known, sample = sample.routed_experts, replace(sample, routed_experts=None)
            sample = _with_experts(replace(sample, segments=(*segments, *own), forks=forks), known, part)
        cut = (number + place + i for i, part in enumerate(tries_of_it) if part.finish_reason in CUTS)
        tries.append(Tries(number + place, len(tries_of_it), after, tuple(cut), place))
        place += len(tries_of_it)
    num_turns = number + place
    return with_facts(
        sample, num_turns=num_turns, awaits_reply=True, is_cut=False, tries=tuple(tries), chat=tuple(chat)
    )


def _with_experts(sample: Sample, known: ExpertArray | None, part: Sample) -> Sample:
    """Return a sample with the experts of its last tokens, and of those before them that nobody recorded.

    known: those of its first tokens. part: has the same last path, with the experts of its own request.
    """
    theirs = part.routed_experts
    if theirs is None:
        return sample
    known = np.empty((0, *theirs.shape[1:]), theirs.dtype) if known is None else known
    experts = with_unrouted(known, sample.num_tokens - len(known))
    assert experts is not None, "there are records"
    here, there = path_to(sample.num_tokens, sample.forks), path_to(part.num_tokens, part.forks)
    is_new = experts[here, -1, -1] < 0
    experts[here[is_new]] = theirs[there[is_new]]
    return replace(sample, routed_experts=experts)
