"""Run the forward passes that compute a step's log-probs, values and entropies: one per model, with hinted rows in it.

`SOURCES` lists, for each of these quantities, the role that computes it, its name there, and the variant of the rows.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any

import numpy as np

from megarl.algos.corrections import CORRECTIONS
from megarl.cluster import offloading
from megarl.config.algo import AlgoConfig, DistillConfig
from megarl.data.hints import donors, hinted_rows
from megarl.record.metrics import Timers
from megarl.train.hinted import HintWriter, require_plain_prompts
from megarl.train.passes import Passes, RolePasses
from megarl.types import (
    Advantages,
    Algorithm,
    FloatArray,
    LikelyTokens,
    Prompt,
    Row,
    Sample,
    TokenQuantity,
    row_from_sample,
)
from megarl.types.messages import Role, RoleSpec


class Variant(Enum):
    """The prompt with which a quantity is computed: the original one, or one with a hint."""

    PLAIN = auto()
    HINTED = auto()  # with the hint of the own prompt
    SHUFFLED = auto()  # with the hint of another prompt
    PAIR = auto()  # the plain and the hinted form together


@dataclass(frozen=True, slots=True)
class QuantitySource:
    """Where a quantity comes from: the role that computes it, its name there, and the form (`Variant`) of the rows."""

    role: Role
    name: str
    variant: Variant = Variant.PLAIN


SOURCES: dict[TokenQuantity, QuantitySource] = {
    TokenQuantity.REF_LOGPROBS: QuantitySource(Role.REFERENCE, "logprobs"),
    TokenQuantity.TEACHER_LOGPROBS: QuantitySource(Role.TEACHER, "logprobs"),
    TokenQuantity.TEACHER_ENTROPY: QuantitySource(Role.TEACHER, "entropy"),
    TokenQuantity.TEACHER_BASELINE_LOGPROBS: QuantitySource(Role.TEACHER, "logprobs", Variant.SHUFFLED),
    TokenQuantity.VALUES: QuantitySource(Role.CRITIC, "values"),
    TokenQuantity.OLD_LOGPROBS: QuantitySource(Role.ACTOR, "logprobs"),
    TokenQuantity.OLD_ENTROPY: QuantitySource(Role.ACTOR, "entropy"),
    TokenQuantity.OLD_SQUARES: QuantitySource(Role.ACTOR, "squares"),
    TokenQuantity.HINT_LOGPROBS: QuantitySource(Role.ACTOR, "logprobs", Variant.HINTED),
    TokenQuantity.SHUFFLED_HINT_LOGPROBS: QuantitySource(Role.ACTOR, "logprobs", Variant.SHUFFLED),
    TokenQuantity.HINT_KL: QuantitySource(Role.ACTOR, "kl", Variant.PAIR),
}
HINT_QUANTITIES = frozenset(quantity for quantity, source in SOURCES.items() if source.variant is not Variant.PLAIN)
# The roles that compute them, in order, with the names of their timers, which are those of verl. The actor comes last,
# so that it is still on its devices for its update.
_TIMERS = {Role.REFERENCE: "ref", Role.TEACHER: "teacher", Role.CRITIC: "values", Role.ACTOR: "old_log_prob"}


def needed_quantities(
    algorithm: Algorithm, cfg: AlgoConfig, *, staleness: int, num_updates: int, gate_passed: bool
) -> frozenset[TokenQuantity]:
    """Return the quantities that a step computes before its update: what the algorithm requires, and perhaps the old
    log-probs.

    Several optimizer steps (`num_updates`), or samples that may be stale, need these for the policy ratio, unless it is
    to the engine's log-probs, or ranks keep the policy itself. A single step on fresh samples needs none: the current
    log-probs are the same. The first step needs them to compare engine and trainer.
    """
    may_differ = num_updates > 1 or staleness > 0
    is_known = CORRECTIONS.get(cfg.correction.name).rollout_ratio or cfg.policy_loss.compared_with == "trainer"
    if not gate_passed or (may_differ and not is_known):
        return algorithm.requires() | {TokenQuantity.OLD_LOGPROBS}
    return algorithm.requires()


def forms_read(
    distill: DistillConfig, roles: Sequence[RoleSpec], needed: Collection[TokenQuantity]
) -> list[tuple[RoleSpec, AbstractSet[Variant]]]:
    """List the models that pass over a step's rows before the update, and which forms of them each one reads."""
    reads_hints = distill.teacher == "hint" and TokenQuantity.TEACHER_LOGPROBS in needed
    passes: list[tuple[RoleSpec, AbstractSet[Variant]]] = [
        (role, forms)
        for role in roles
        if (forms := {SOURCES[name].variant for name in needed if SOURCES[name].role is role.role.kind})
        and not (reads_hints and role.role is Role.TEACHER)
    ]
    reader = next((role for role in roles if role.role is Role.TEACHER), roles[0])
    others = {Variant.SHUFFLED} if distill.shuffled_baseline else set()
    return [*passes, (reader, {Variant.HINTED, *others})] if reads_hints else passes


def with_quantities(rows: Sequence[Row], quantities: Mapping[Any, Sequence[FloatArray]]) -> list[Row]:
    """Return the rows with further quantities by name, each given in row order."""
    return [
        row.with_quantities(**{str(name): values[i] for name, values in quantities.items()})
        for i, row in enumerate(rows)
    ]


def with_likely_tokens(rows: Sequence[Row], found: Mapping[str, Sequence[FloatArray]]) -> list[Row]:
    """Return the rows with the likeliest tokens that a teacher's pass found, if it was asked for them.

    Ids come as float32, which is exact up to 2^24.
    """
    if "top_ids" not in found:
        return list(rows)
    pairs = zip(found["top_ids"], found["top_logprobs"], strict=True)
    likely = [LikelyTokens(ids=ids.astype(np.int32), logprobs=logprobs) for ids, logprobs in pairs]
    return [replace(row, likely=each) for row, each in zip(rows, likely, strict=True)]


def with_advantages(rows: Sequence[Row], advantages: Advantages) -> list[Row]:
    """Return the rows with their advantages and the other quantities that the updates read."""
    named = {"advantages": advantages.values, **advantages.quantities}
    host = {name: values.float().numpy() for name, values in named.items()}
    return with_quantities(
        rows, {name: [v[i, : row.num_response_tokens] for i, row in enumerate(rows)] for name, v in host.items()}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardStage:
    """The stage of a step that adds to rows the quantities (log-probs, values, …) that the algorithm needs.

    `enter` is called before each pass with its phase, so that the model is on its devices. teachers: on
    Megatron or behind servers. teacher_of: returns the role of the teacher of a prompt's samples.
    """

    passes: Mapping[Role, RolePasses]
    teachers: Mapping[Role, Passes] = field(default_factory=dict)
    teacher_of: Callable[[Prompt], Role] = lambda _: Role.TEACHER
    hints: HintWriter | None
    # Whether the teacher reads prompts with hints.
    hinted_teacher: bool = False
    enter: Callable[[offloading.Phase], None]
    timers: Timers

    def add_quantities(
        self, rows: list[Row], prompts: Mapping[str, Prompt], needed: frozenset[TokenQuantity], *, seed: int, step: int
    ) -> tuple[list[Row], dict[str, float]]:
        """Return the rows with the quantities `needed`, and metrics of the hints.

        A pass adds every quantity that its role computes for rows without hints, needed or not. seed: draws which
        prompts exchange their hints for the shuffled baseline.
        """
        metrics: dict[str, float] = {}
        baseline: Sequence[Row] = ()
        if self.hinted_teacher:
            assert self.hints is not None, "a teacher that reads hints needs a HintWriter"
            shuffled = TokenQuantity.TEACHER_BASELINE_LOGPROBS in needed
            taught = self.hints.for_teacher(rows, prompts, seed=seed, shuffled=shuffled)
            rows, baseline, metrics = taught.rows, taught.baseline, dict(taught.metrics)
        for role, timer in _TIMERS.items():
            wanted = {name for name in needed if SOURCES[name].role is role}
            if not wanted:
                continue
            if role is Role.TEACHER:
                with self.timers(timer):
                    rows = self._taught(rows, prompts, step=step, baseline=baseline)
                continue
            self.enter(self.passes[role].phase)
            with self.timers(timer):
                if wanted & HINT_QUANTITIES:
                    rows, metrics = self._forward_hinted(role, rows, prompts, wanted, seed=seed, step=step)
                else:
                    rows = with_quantities(rows, _plain_quantities(role, self.passes[role].forward(rows, step=step)))
        return rows, metrics

    def held_out_divergence(
        self, samples: Sequence[Sample], prompts: Mapping[str, Prompt], *, step: int
    ) -> dict[str, float]:
        """Return the mean log-ratio of policy to teacher on tokens of samples, which estimates the reverse KL.

        Samples that fit no micro-batch of either are left out.
        """
        room = min(each.room for each in (self.passes[Role.ACTOR], *self.teachers.values()))
        rows = [row for row in map(row_from_sample, samples) if row.num_tokens <= room and row.num_loss_tokens]
        if not rows:
            return {}
        self.enter(self.passes[Role.ACTOR].phase)
        own = self.passes[Role.ACTOR].forward(rows, step=step)["logprobs"]
        taught = [row.quantities[TokenQuantity.TEACHER_LOGPROBS] for row in self._taught(rows, prompts, step=step)]
        ratios = [(p - q)[row.loss_mask] for row, p, q in zip(rows, own, taught, strict=True)]
        return {"val/distill/reverse_kl": float(np.concatenate(ratios).mean(dtype=np.float64))}

    def _taught(
        self, rows: Sequence[Row], prompts: Mapping[str, Prompt], *, step: int, baseline: Sequence[Row] = ()
    ) -> list[Row]:
        """Return the rows with what their teachers say of them; each teacher passes once over its own rows.

        baseline: the rows after prompts with others' hints, which are scored, too; empty: without them.
        """
        teachers = {uid: self.teacher_of(prompts[uid]) for uid in dict.fromkeys(row.uid for row in rows)}
        taught = list(rows)
        for teacher in dict.fromkeys(teachers.values()):
            places = [i for i, row in enumerate(rows) if teachers[row.uid] is teacher]
            asked, count = [rows[i].as_taught for i in places], len(places)
            self.enter(self.teachers[teacher].phase)
            found = self.teachers[teacher].forward([*asked, *(baseline[i] for i in places if baseline)], step=step)
            own = {name: values[:count] for name, values in found.items()}
            said = with_quantities([rows[i] for i in places], _plain_quantities(Role.TEACHER, own))
            if baseline:
                said = with_quantities(said, {TokenQuantity.TEACHER_BASELINE_LOGPROBS: found["logprobs"][count:]})
            for i, row in zip(places, with_likely_tokens(said, own), strict=True):
                taught[i] = row
        # A teacher behind servers says nothing of entropies.
        shared = frozenset.intersection(*(frozenset(row.quantities) for row in taught))
        return [row.only(shared, routed_experts=True, nucleus=True, likely=True, hinted_prompt=True) for row in taught]

    def _forward_hinted(
        self,
        role: Role,
        rows: list[Row],
        prompts: Mapping[str, Prompt],
        wanted: set[TokenQuantity],
        *,
        seed: int,
        step: int,
    ) -> tuple[list[Row], dict[str, float]]:
        """Run one pass of a role over rows with and without hints, packed together."""
        assert self.hints is not None, "an algorithm with hints needs a HintWriter"
        placer, count = self.hints.placer, len(rows)
        require_plain_prompts(rows, prompts)
        own = placer.place_all(prompts)
        # Every quantity of hints is compared with the log-probs under the own hint.
        variants = {TokenQuantity.HINT_LOGPROBS: hinted_rows(rows, own)}
        if TokenQuantity.SHUFFLED_HINT_LOGPROBS in wanted:
            others = placer.place_all(prompts, donors(own, seed=seed))
            variants[TokenQuantity.SHUFFLED_HINT_LOGPROBS] = hinted_rows(rows, others)
        # A row counts as hinted only if all its variants got a hint; otherwise there would be nothing to compare with.
        has_hint = np.logical_and.reduce([variant.has_hint for variant in variants.values()])
        asked = [*rows, *(row for variant in variants.values() for row in variant.rows)]
        pairs = (
            np.flatnonzero(variants[TokenQuantity.HINT_LOGPROBS].has_hint)
            if TokenQuantity.HINT_KL in wanted
            else np.empty(0, int)
        )
        found = _forward_with_pairs(self.passes[role], asked, pairs.tolist(), count, step)
        quantities = _plain_quantities(role, {name: values[:count] for name, values in found.items()})
        for place, name in enumerate(variants, start=1):
            source = SOURCES[name].name
            hinted = found[source][place * count : (place + 1) * count]
            # Rows without a hint get exactly their plain log-probs.
            quantities[name] = [
                a if has else b for has, a, b in zip(has_hint, hinted, found[source][:count], strict=True)
            ]
        if TokenQuantity.HINT_KL in wanted:
            quantities[TokenQuantity.HINT_KL] = found["kl"]
        rows = self.hints.excluded(with_quantities(rows, quantities), has_hint)
        return rows, variants[TokenQuantity.HINT_LOGPROBS].metrics()


def _plain_quantities(role: Role, found: Mapping[str, list[FloatArray]]) -> dict[TokenQuantity, list[FloatArray]]:
    """Select, from what a role computed, the quantities of the rows without hints."""
    return {
        quantity: found[source.name]
        for quantity, source in SOURCES.items()
        if source.role is role and source.variant is Variant.PLAIN and source.name in found
    }


def _forward_with_pairs(
    actor: RolePasses, asked: Sequence[Row], pairs: Sequence[int], count: int, step: int
) -> dict[str, list[FloatArray]]:
    """Compute log-probs and entropies of all rows, and KL(with hint ‖ without) for the first `count` of them.

    asked: the rows; row `count + i` is row i with its hint. pairs: the i whose two forms share a forward pass. For
    other rows the KL is 0: they have no hint, because both forms do not fit into one micro-batch.
    """
    twins = [count + i for i in pairs]
    together = {*pairs, *twins}
    alone = [i for i in range(len(asked)) if i not in together]
    places = [*alone, *pairs, *twins]
    single = actor.forward([asked[i] for i in alone], step=step) if alone else {"logprobs": [], "entropy": []}
    kl = [np.zeros(row.num_response_tokens, np.float32) for row in asked[:count]]
    paired: dict[str, list[FloatArray]] = {"logprobs": [], "entropy": []}
    if pairs:
        paired = actor.forward_pairs([asked[i] for i in pairs], [asked[i] for i in twins], step=step)
        for i, values in zip(pairs, paired["kl"], strict=True):
            kl[i] = values
    order = np.argsort(places)
    joined = {name: [*single[name], *paired[name]] for name in ("logprobs", "entropy")}
    return {**{name: [values[i] for i in order] for name, values in joined.items()}, "kl": kl}
