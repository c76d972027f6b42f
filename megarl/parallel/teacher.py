"""Compute a frozen teacher's hidden states beside an update, for a loss over the whole vocabulary.

Without pipeline stages, each micro-batch passes through the teacher just before the model in training, and nothing is
kept. With stages, the teacher's passes come before the update, and its hidden states of labels wait in host memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch

from megarl.parallel.head.distill import TeacherLogits
from megarl.parallel.head.policy import HeadRequest, TokenStates
from megarl.parallel.head.resplit import resplit_weight
from megarl.parallel.head.statistics import VocabShard
from megarl.parallel.model import PackedModel, PolicyModel
from megarl.parallel.packing import Pack
from megarl.parallel.roles import LoadedRole


@dataclass(slots=True, kw_only=True)
class TeacherBeside:
    """A teacher with the layout of the model in training, and its hidden states of labels that wait, by micro-batch.

    request: how the states are asked for. shard: the student's part of the vocabulary on this rank.
    """

    loaded: LoadedRole
    request: HeadRequest
    shard: VocabShard
    common: int | None
    waiting: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)
    weight: torch.Tensor | None = None
    own_shard: VocabShard | None = None

    @property
    def model(self) -> PolicyModel:
        return cast(PolicyModel, self.loaded.chunks[0])

    def keep(self, model: PackedModel, pack: Pack, indices: Sequence[int], states: object) -> None:
        """Let the hidden states of a micro-batch wait on the host."""
        assert isinstance(states, TokenStates)
        self.waiting[tuple(indices)] = states.hidden.cpu()

    @torch.no_grad()
    def logits(self, pack: Pack, indices: Sequence[int]) -> TeacherLogits | None:
        """Return what the head needs to compute the teacher's logits of a micro-batch; None before the last stage."""
        model = self.model
        if not model.post_process:
            return None
        if self.weight is None or self.own_shard is None:
            self.weight, self.own_shard = resplit_weight(model.output_weight, model.vocab_shard, self.shard)
        if model.pre_process:
            states = model(pack, self.request)
            assert isinstance(states, TokenStates)
            hidden = states.hidden
        else:
            hidden = self.waiting[tuple(indices)].to(pack.labels.device)
        return TeacherLogits(
            hidden=hidden,
            weight=self.weight,
            shard=self.own_shard,
            temperature=self.request.temperature * model.spec.multipliers.logits_divisor,
            logit_cap=model.spec.logit_cap,
            fp32_logits=self.request.fp32_logits,
            common=self.common,
        )
