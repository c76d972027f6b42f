"""What a plan costs: bytes on the wire, messages, and what processes stage at once."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from megarl.sync.plan.build import Message, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStatistics:
    """Of a whole transfer. `staging_bytes`: the sum over processes of the most that each stages at a time."""

    wire_bytes: int
    local_bytes: int
    num_messages: int
    num_buckets: int
    max_received_bytes: int
    max_sent_bytes: int
    staging_bytes: int


def plan_statistics(plan: Plan, *, depth: int) -> PlanStatistics:
    """Of a plan whose execution has up to `depth` buckets under way."""
    wire = [message for message in plan.messages if not message.local]
    received, sent = defaultdict[int, int](int), defaultdict[int, int](int)
    for message in wire:
        received[message.sink] += message.num_bytes
        sent[message.source] += message.num_bytes
    sources = {message.source for message in plan.messages}
    sinks = {message.sink for message in plan.messages}
    staged = [_staged(plan.of_source(i), depth) for i in sources] + [_staged(plan.of_sink(i), depth) for i in sinks]
    return PlanStatistics(
        wire_bytes=plan.wire_bytes,
        local_bytes=sum(message.num_bytes for message in plan.messages) - plan.wire_bytes,
        num_messages=len(wire),
        num_buckets=len({message.bucket for message in plan.messages}),
        max_received_bytes=max(received.values(), default=0),
        max_sent_bytes=max(sent.values(), default=0),
        staging_bytes=sum(staged),
    )


def _staged(messages: Iterable[Message], depth: int) -> int:
    """The most bytes of `depth` buckets in succession."""
    by_bucket = defaultdict[int, int](int)
    for message in messages:
        by_bucket[message.bucket] += message.num_bytes
    return max((sum(by_bucket.get(first + i, 0) for i in range(depth)) for first in list(by_bucket)), default=0)
