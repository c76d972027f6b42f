"""Check after syncs that engines compute as the trainer does: the canary, which is the mismatch gate asked again.

A round takes three turns. Before a sync, every engine answers a few prompts, so that its prefix cache holds their keys.
When it samples with the new weights, it answers them again, as ordinary requests. Before the next update, the trainer
computes the log-probs of these answers, under the version that the engines claim. Few tokens may differ much by chance,
as where a router's choice flips: only what a second, other answer shows too ends a run.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from megarl.cluster import offloading
from megarl.cluster.engines import EngineGroup
from megarl.cluster.supervisor import EngineSupervisor
from megarl.config.generation import RolloutConfig, SyncConfig
from megarl.errors import MismatchError, WeightSyncError, WorkerError
from megarl.host.clock import awake_s
from megarl.host.writing import dispensable, replacing
from megarl.rollout.canary import NUM_PROMPTS, block_tokens, canary_requests, held_digests
from megarl.rollout.engine import Completion, GenerationRequest, VllmEngine
from megarl.rollout.vllm_source import extended
from megarl.train.gate import mismatch_of
from megarl.train.passes import Passes
from megarl.types import FinishReason, FloatArray, Prompt, Row, Sample, prompt_segment, row_from_sample

# Rounds may take this share of a run's time.
SHARE = 0.01
# The mean of n differences scatters by about 1/√n of what a single one is large.
_DEVIATIONS = 4.0
# Weights that a message names.
_MOST_NAMED = 3


def syncs_apart(round_s: float, step_s: float) -> int:
    """Return after how many syncs a round is due again, so that rounds take at most `SHARE` of the time."""
    return max(1, math.ceil(round_s / (SHARE * step_s))) if step_s > 0 else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFinding:
    """How far an engine's answers are from the trainer's.

    means: of |Δ log-prob| over each answer, in nats; limits: what these may be. claims: the versions of the weights
    that the engine says it answered with. num_cached: how many of the prompts' tokens its prefix cache had.
    """

    largest: float
    means: tuple[float, ...]
    limits: tuple[float, ...]
    claims: tuple[int, ...]
    num_cached: int

    @classmethod
    def of(
        cls, rows: Sequence[Row], logprobs: Sequence[FloatArray], completions: Sequence[Completion], limit: float
    ) -> "EngineFinding":
        """Compare an engine's answers, a row each, with the trainer's log-probs. limit: the gate's of a rollout."""
        found = [mismatch_of([row], [each]).metrics() for row, each in zip(rows, logprobs, strict=True)]
        return cls(
            largest=max(each["mismatch/abs_max"] for each in found),
            means=tuple(each["mismatch/abs_mean"] for each in found),
            limits=tuple(limit * (1 + _DEVIATIONS / math.sqrt(row.num_loss_tokens)) for row in rows),
            claims=tuple(sorted({span.version for each in completions for span in each.versions})),
            num_cached=sum(each.num_cached for each in completions),
        )

    @property
    def mean(self) -> float:
        return sum(self.means) / len(self.means)

    def is_of_another_version(self, version: int) -> bool:
        """Whether the engine answered by older weights or keys, as it says itself."""
        return self.claims != (version,) or self.num_cached > 0

    def problems(self, version: int) -> list[str]:
        """Say what is wrong with an engine that was sent the weights of `version`; nothing: an empty list."""
        said = []
        if self.claims != (version,):
            said.append(f"claims to have sampled with version {', '.join(map(str, self.claims))}")
        over = [(mean, most) for mean, most in zip(self.means, self.limits, strict=True) if not mean <= most]
        if over:
            said.append(
                f"differs from the trainer by {self.mean:.2g} nats on average and {self.largest:.2g} at most; in "
                f"{len(over)} of {len(self.means)} answers by {over[0][0]:.2g} on average, the limit is "
                f"{over[0][1]:.2g}"
            )
        if self.num_cached:
            said.append(f"had {self.num_cached} tokens of the prompts in its prefix cache, whose keys are older")
        return said


def changed_weights(held: Sequence[Mapping[str, int]], sent: Sequence[Mapping[str, int]]) -> str:
    """Say which of an engine's weights changed when sent again; held, sent: each worker's digests before and after."""
    names = [
        f"{name} of worker {worker}"
        for worker, (before, after) in enumerate(zip(held, sent, strict=True))
        for name in before
        if before[name] != after.get(name)
    ]
    if not names:
        return "none of its weights changed when they were sent again: look at its cache, adapters' scale and dtype"
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"{len(names)} of its weights changed when they were sent again: {', '.join(names[:_MOST_NAMED])}{more}"


@dataclass(slots=True, kw_only=True)
class Canary:
    """The canary of a run or a session; `Trainer` and `Session` say when engines sample, and when the policy changes.

    every: as `sync.canary_every`. limit: the gate's. room: the longest sequence of engines and trainer. passes: the
    actor's. resend: sends the present weights again, as a version. holds: whether engines still have their weights
    while the trainer works. file: gets the digests of a failed round.
    """

    every: int | None
    limit: float
    room: int
    temperature: float
    engines: EngineGroup
    passes: Passes
    enter: Callable[[offloading.Phase], None]
    resend: Callable[[int], object]
    holds: bool
    file: Path
    _requests: list[GenerationRequest] = field(default_factory=list)
    _answers: dict[int, list[Completion]] = field(default_factory=dict)
    # The version whose caches are filled, that of the first round, and the one that is looked at next.
    _primed: int | None = None
    _first: int = 0
    _next: int = 0
    # The time of the first round, and what all took, and what was since the last check.
    _began_s: float = 0.0
    _spent_s: float = 0.0
    _round_s: float = 0.0

    def prime(self, version: int, prompts: Iterable[Prompt]) -> None:
        """Fill the caches before the sync of `version` if this is one to look at. prompts: some to choose from."""
        # The time that a round takes is known at its end.
        due = version % self.every == 0 if self.every else version >= self._next and not self._answers
        if self.every == 0 or not due or self._primed == version:
            return
        began = awake_s()
        if not self._requests:
            blocks = self.engines.ask_each(block_tokens, doing="asking for the size of cached blocks").values()
            block = max(blocks, default=1)
            self._requests = canary_requests(prompts, block=block, room=self.room, temperature=self.temperature)
            self._first, self._began_s = version, began
        if self._requests:
            self._ask(self._requests)
            self._primed = version
        self._count(began)

    def ask(self, version: int) -> None:
        """Let engines that sample with `version` answer, if their caches were filled before its sync."""
        if version == self._primed:
            began, self._primed = awake_s(), None
            self._answers = self._ask(self._requests)
            self._count(began)

    def check(self, version: int, step: int) -> dict[str, float]:
        """Compare the answers with the trainer's log-probs, whose weights are still of `version`; return metrics.

        The weights change afterwards: what has not been asked is not asked later. Raises MismatchError if an engine
        answers with other weights, or reads keys that older ones computed.
        """
        if self._primed == version:
            self._primed = None
        if not self._answers:
            return {}
        began, answers, self._answers = awake_s(), self._answers, {}
        found = self._compared(self._requests, answers, step)
        if any(each.problems(version) for each in found.values()):
            if not any(each.is_of_another_version(version) for each in found.values()):
                others = [
                    replace(each, seed=each.seed + NUM_PROMPTS, cache_salt=f"{each.cache_salt}, version {version}")
                    for each in self._requests
                ]
                found = self._compared(others, self._ask(others), step)
            if any(each.problems(version) for each in found.values()):
                raise MismatchError(self._explained(version, found))
        self._count(began)
        step_s = (awake_s() - self._began_s - self._spent_s) / (version + 1 - self._first)
        every = self.every or syncs_apart(self._round_s, step_s)
        self._next, seconds, self._round_s = version + every, self._round_s, 0.0
        return {
            "canary/max_abs_diff": max(each.largest for each in found.values()),
            "canary/mean_abs_diff": sum(each.mean for each in found.values()) / len(found),
            "canary/cached_tokens": float(sum(each.num_cached for each in found.values())),
            "canary/seconds": seconds,
            "canary/every": float(every),
        }

    def forget(self) -> None:
        """Give up the present round, since the trainer gets weights that no sync has sent."""
        self._answers, self._primed = {}, None

    def _count(self, began: float) -> None:
        seconds = awake_s() - began
        self._round_s, self._spent_s = self._round_s + seconds, self._spent_s + seconds

    def _ask(self, requests: list[GenerationRequest]) -> dict[int, list[Completion]]:
        self.enter(offloading.GENERATE)
        return self.engines.ask_each(partial(VllmEngine.generate, requests=requests), doing="asking the canary")

    def _compared(
        self, requests: Sequence[GenerationRequest], answers: Mapping[int, Sequence[Completion]], step: int
    ) -> dict[int, EngineFinding]:
        rows = {engine: _rows(engine, requests, completions) for engine, completions in answers.items()}
        self.enter(self.passes.phase)
        logprobs = iter(self.passes.forward([row for each in rows.values() for row in each], step=step)["logprobs"])
        return {
            engine: EngineFinding.of(each, [next(logprobs) for _ in each], answers[engine], self.limit)
            for engine, each in rows.items()
        }

    def _explained(self, version: int, found: Mapping[int, EngineFinding]) -> str:
        """Write what was found, and digests of live engines, to the file; return all of it in words."""
        wrong = {engine: said for engine, each in found.items() if (said := each.problems(version))}
        said = [f"engine {engine} {'; it '.join(each)}" for engine, each in wrong.items()]
        held, sent = dict[int, Sequence[dict[str, int]]](), dict[int, Sequence[dict[str, int]]]()
        if self.holds:
            try:
                held = self.engines.ask_each(held_digests, doing="reading weights of engines")
                self.resend(version)
                sent = self.engines.ask_each(held_digests, doing="reading weights of engines")
                said += [f"engine {i}: {changed_weights(held[i], sent[i])}" for i in wrong if i in held and i in sent]
            except (WeightSyncError, WorkerError) as error:
                said.append(f"sending the weights again failed: {error}")
        engines = {
            i: asdict(each) | {"held": held.get(i, ()), "sent_again": sent.get(i, ())} for i, each in found.items()
        }
        with dispensable(self.file.name):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self.file) as partial_file:
                partial_file.write_text(json.dumps({"version": version, "engines": engines}), encoding="utf-8")
        return (
            f"canary: after the sync of version {version}, {'. '.join(said)}. No sample of this version was trained "
            f"on. {self.file} has the digests of all weights. Resume the run, whose engines then start anew; if it "
            f"happens again, `megarl bisect {self.file.parent}` names the tensor and the cause, and sync.verify=true "
            f"compares every tensor as it is sent (sync.canary_every=0 looks no more)"
        )


def _rows(engine: int, requests: Sequence[GenerationRequest], completions: Sequence[Completion]) -> list[Row]:
    rows = []
    for asked, completion in zip(requests, completions, strict=True):
        given, cut = prompt_segment(asked.token_ids, asked.images), FinishReason.ABORT
        sample = Sample(uid=asked.whose, sample_index=engine, seed=asked.seed, segments=(given,), finish_reason=cut)
        rows.append(row_from_sample(extended(sample, completion)))
    return rows


def open_canary(
    engines: EngineGroup,
    supervisor: EngineSupervisor,
    memory: offloading.MemoryLedger,
    actor: Passes,
    sync: SyncConfig,
    rollout: RolloutConfig,
    *,
    max_model_tokens: int,
    limit: float,
    file: Path,
) -> Canary:
    """Return the canary of engines whose context is so long. limit, file: as for `Canary`."""
    return Canary(
        every=sync.canary_every,
        limit=limit,
        room=min(actor.room, max_model_tokens),
        temperature=rollout.temperature,
        engines=engines,
        passes=actor,
        enter=memory.enter,
        resend=partial(supervisor.push, verify=True),
        holds=not memory.enabled,
        file=file,
    )
