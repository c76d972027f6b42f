"""Compute metrics of conversations with environments: turns, tools, time and failures."""

import math
from collections import defaultdict
from collections.abc import Iterable

from megarl.record.metrics import summarize
from megarl.types import Sample

FAILURES = ("raised", "timed_out", "died")


def episode_metrics(samples: Iterable[Sample]) -> dict[str, float]:
    """Return metrics of all samples that have a conversation; none without any.

    environment/turns/{mean,…}: turns of the policy; environment/tool_calls: mean number of calls;
    perf/environment_reply_s: mean time that an environment took for a whole conversation; environment/failed_frac and
    environment/{raised,timed_out,died}: share and numbers of failures; environment/restarted: conversations that began
    again since a host died; environment/detail/NAME: means of the numbers that environments said.
    """
    episodes = [sample.episode for sample in samples if sample.episode is not None]
    if not episodes:
        return {}
    details: dict[str, list[float]] = defaultdict(list)
    for episode in episodes:
        for name, value in episode.details.items():
            if isinstance(value, bool | int | float) and math.isfinite(value):
                details[name].append(float(value))
    count = len(episodes)
    return {
        **summarize([float(each.num_turns) for each in episodes]).as_metrics("environment/turns"),
        "environment/tool_calls": sum(each.num_calls for each in episodes) / count,
        "perf/environment_reply_s": sum(each.seconds for each in episodes) / count,
        "environment/failed_frac": sum(bool(each.failure) for each in episodes) / count,
        **{f"environment/{kind}": float(sum(each.failure == kind for each in episodes)) for kind in FAILURES},
        "environment/restarted": float(sum(each.num_restarts for each in episodes)),
        **{f"environment/detail/{name}": sum(values) / len(values) for name, values in details.items()},
    }
