"""Compute a teacher's hidden states beside an update, for a loss over the whole vocabulary.

Without pipeline stages, each micro-batch passes through the teacher just before the model in training, and nothing is
kept. With stages, the teacher's passes come before the update, and its hidden states of labels wait in host memory. So
do those of the policy itself, where later updates of a step compare it with what it was, or with earlier versions. A
teacher that reads other prompts, such as the policy itself with hints, has packs of its own; its states are then put
into the order of the labels in the packs of the model in training.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.distributed as dist

from megarl.host.device.accelerators import FP8_RECIPES
from megarl.host.device.platform import platform
from megarl.parallel.adapters import without_adapters
from megarl.parallel.head.given_teachers import TeacherLogits
from megarl.parallel.head.policy import HeadRequest, TokenStates
from megarl.parallel.head.rows import RowOwners, uneven_owners
from megarl.parallel.head.statistics import VocabShard, gather_parts
from megarl.parallel.model import PackedModel, PolicyModel
from megarl.parallel.packing import Pack, PackAlignment, pack_rows
from megarl.parallel.roles import LoadedRole
from megarl.types import Row, Rows, row_batch
from megarl.types.objectives import HeadMeasure
from megarl.types.rows import LAG


def pack_for(models: Sequence[PackedModel], rows: Sequence[Row]) -> Pack:
    """Pack rows such that all these models can read them; the first one may send tokens to the experts recorded."""
    return pack_rows(
        rows,
        alignment=alignment_of(models),
        device=platform().device(),
        plans_attention=any(each.plans_attention for each in models),
        shares_prefixes=all(each.shares_prefixes for each in models),
        gathers_keys=any(each.gathers_keys for each in models),
        plans_blocks=any(each.plans_blocks for each in models),
        replay_routing=models[0].replays_routing,
        has_mrope=any(each.mrope is not None for each in models),
        sees_whole_images=any(each.spec.sees_whole_images for each in models),
    )


def alignment_of(models: Sequence[PackedModel]) -> PackAlignment:
    """Return what packs that suit all these models must be multiples of; they have one layout."""
    layout = models[0].layout
    return PackAlignment(
        tp=layout.config.tp if layout.config.sequence_parallel else 1,
        cp=layout.config.cp,
        cp_rank=layout.cp_group.rank(),
        block=max(1 if m.config.fp8 is None else FP8_RECIPES[m.config.fp8_recipe].block for m in models),
    )


def resplit_weight(weight: torch.Tensor, own: VocabShard, like: VocabShard) -> tuple[torch.Tensor, VocabShard]:
    """Split a teacher's output weight over ranks as the student's: from `like.start` to the next rank's start.

    weight: [≥ own.size, H'], this rank's rows `own` of the teacher's. The last rank gets all that are left. Every rank
    of the group calls this. Where the two are split alike already, the arguments are returned.
    """
    group, rank, size = own.group, own.group.rank(), own.group.size()
    if size == 1:
        return weight, own
    spans = torch.tensor([own.start, own.size, like.start], device=weight.device)
    table = gather_parts(spans[:, None], group)[:, :, 0].tolist()
    end = max(start + count for start, count, _ in table if count)
    # Trailing ranks without a token have no start of their own.
    starts = [min(start, end) for _, _, start in table]
    stops = [*starts[1:], end]
    if all(start == first or not count for (start, count, _), first in zip(table, starts, strict=True)):
        return weight, VocabShard(group=group, start=like.start, size=own.size)
    made = weight.new_empty(stops[rank] - starts[rank], weight.shape[1])
    transfers = []
    for source, (start, count, _) in enumerate(table):
        for target in range(size):
            first, last = max(start, starts[target]), min(start + count, stops[target])
            if first >= last or rank not in (source, target):
                continue
            here = weight.detach()[first - own.start : last - own.start]
            there = made[first - starts[rank] : last - starts[rank]]
            if source == target:
                there.copy_(here)
            elif rank == source:
                transfers.append(dist.P2POp(dist.isend, here.contiguous(), group=group, group_peer=target))
            else:
                transfers.append(dist.P2POp(dist.irecv, there, group=group, group_peer=source))
    for work in dist.batch_isend_irecv(transfers) if transfers else []:
        work.wait()
    return made, VocabShard(group=group, start=like.start, size=len(made))


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelStates:
    """Hidden states that predict the labels of a pack, of this rank's part, with the place of each label in its rows.

    counts: as `Pack.kept_per_rank`. which: by whose weights each was computed: the number of a copy of
    `EarlierVersions`, or −1, the model's own.
    """

    hidden: torch.Tensor
    row_index: torch.Tensor
    column_index: torch.Tensor
    counts: tuple[int, ...]
    which: torch.Tensor

    @classmethod
    def of(cls, states: TokenStates, pack: Pack) -> "LabelStates":
        return cls(
            hidden=states.hidden,
            row_index=pack.row_index,
            column_index=pack.column_index,
            counts=pack.kept_per_rank,
            which=torch.full(pack.row_index.shape, -1, device=pack.row_index.device),
        )

    def in_order_of(self, pack: Pack, model: PackedModel) -> torch.Tensor:
        """Return the states that this rank needs of the same labels in another pack, in that one's order."""
        tp, cp = model.layout.tp_group, model.layout.cp_group
        split = model.config.sequence_parallel
        hidden = RowOwners(group=tp, counts=self.counts if split else None).gather(self.hidden.to(pack.labels.device))
        owners = uneven_owners(len(hidden), cp, hidden.device)
        hidden, rows, columns = (owners.gather(each) for each in (hidden, self.row_index, self.column_index))
        # The places of labels as single numbers, of which each pack has its own order.
        known, wanted = (r * pack.batch_shape[1] + c for r, c in ((rows, columns), (pack.row_index, pack.column_index)))
        order = known.argsort()
        found = hidden[order[torch.searchsorted(known[order], wanted)]]
        return RowOwners(group=tp, counts=pack.kept_per_rank if split else None).own(found)


@dataclass(slots=True, kw_only=True)
class TeacherBeside:
    """A teacher with the layout of the model in training, and its hidden states of labels that wait, by micro-batch.

    request: how the states are asked for. shard: the student's part of the vocabulary on this rank. measure: what is
    computed beside it in place of a divergence. taught: the rows by
    index as the teacher reads them; None: as the model in training does.
    """

    loaded: LoadedRole
    request: HeadRequest
    shard: VocabShard
    common: int | None
    measure: HeadMeasure | None = None
    taught: Mapping[int, Row] | None = None
    waiting: dict[tuple[int, ...], LabelStates] = field(default_factory=dict)
    weight: torch.Tensor | None = None
    own_shard: VocabShard | None = None
    # Output weights of earlier versions, by the numbers of their copies.
    others: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def model(self) -> PolicyModel:
        return cast(PolicyModel, self.loaded.chunks[-1])

    def keep(self, model: PackedModel, pack: Pack, indices: Sequence[int], states: object) -> None:
        """Let the hidden states of a micro-batch wait on the host."""
        assert isinstance(states, TokenStates)
        self.waiting[tuple(indices)] = LabelStates.of(TokenStates(hidden=states.hidden.cpu()), pack)

    def keep_of(self, number: int, lags: Sequence[int], rows: Rows) -> Callable[..., None]:
        """Return what lets those states of a micro-batch wait in place of others whose tokens have these lags."""

        def keep(model: PackedModel, pack: Pack, indices: Sequence[int], states: object) -> None:
            assert isinstance(states, TokenStates)
            kept = self.waiting[tuple(indices)]
            lag = row_batch([rows[i] for i in indices], device=pack.labels.device).quantity(LAG)
            mine = torch.isin(lag[pack.row_index, pack.column_index], lag.new_tensor(lags))
            kept.which[mine] = number
            counts = pack.kept_per_rank if model.config.sequence_parallel else None
            own = RowOwners(group=model.layout.tp_group, counts=counts).own(mine).cpu()
            kept.hidden[own] = states.hidden.cpu()[own]

        return keep

    @torch.no_grad()
    def logits(self, pack: Pack, indices: Sequence[int]) -> TeacherLogits | None:
        """Return what the head needs to compute the teacher's logits of a micro-batch; None before the last stage."""
        model = self.model
        if not model.post_process:
            return None
        if (states := self.waiting.get(tuple(indices))) is None:
            own = pack if self.taught is None else pack_for([model], [self.taught[i] for i in indices])
            with self.as_teacher():
                answer = model(own, self.request)
            assert isinstance(answer, TokenStates)
            states = LabelStates.of(answer, own)
        if self.weight is None or self.own_shard is None:
            self.weight, self.own_shard = resplit_weight(model.output_weight.detach(), model.vocab_shard, self.shard)
        return TeacherLogits(
            hidden=states.hidden.to(pack.labels.device) if self.taught is None else states.in_order_of(pack, model),
            weight=self.weight,
            shard=self.own_shard,
            temperature=self.request.temperature * model.spec.multipliers.logits_divisor,
            logit_cap=model.spec.logit_cap,
            fp32_logits=self.request.fp32_logits,
            common=self.common,
            measure=self.measure,
            others=self.others,
            which=states.which if self.others else None,
        )

    def as_teacher(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which the model computes as the teacher: without adapters, if that is what it is."""
        return contextlib.nullcontext() if self.loaded.spec.has_memory else without_adapters(self.loaded.chunks)
