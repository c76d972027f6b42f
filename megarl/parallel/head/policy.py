"""Apply the log-prob head to a packed model: choose the labels to compute, the memory mode, and the gradient
buffers.
"""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from megarl.config.schema import HeadConfig
from megarl.parallel.head.differentiable import LossGradients
from megarl.parallel.head.distill import DistilledLogprobs, vocab_parallel_divergence
from megarl.parallel.head.divergence import Divergence
from megarl.parallel.head.given_teachers import TeacherLogits, TopLogits
from megarl.parallel.head.logprobs import (
    HeadOptions,
    TokenLogprobs,
    head_inputs,
    vocab_parallel_logprobs,
    vocab_parallel_top_logprobs,
)
from megarl.parallel.head.memory_mode import HeadMemoryMode, choose_memory_mode
from megarl.parallel.head.pairs import TokenPairs, pair_statistics
from megarl.parallel.head.recorded import RecordedHead
from megarl.parallel.head.rows import RowOwners, uneven_owners
from megarl.parallel.head.statistics import VocabShard, row_statistics
from megarl.parallel.packing import Pack
from megarl.types.messages import Teaching


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRequest:
    """The request to the log-prob head for a pack (a micro-batch as one sequence): the values to compute, and how.

    temperature: one for all rows. entropy_needs_grad: whether the entropy is differentiated. token_local: whether the
    loss is a sum over tokens, each term depending only on its token. paired: the second half of the rows repeats the
    responses of the first half after other prompts; also compute the KLs between both. states_only: answer the hidden
    states that predict labels instead. top_k: also answer the likeliest tokens. common: answer distributions over so
    many first tokens of the vocabulary; None: over all. squares: also answer Σ p² of each distribution, without
    gradients. teaching: also compare with a teacher.
    """

    temperature: float
    settings: HeadConfig
    fp32_logits: bool = False
    entropy_needs_grad: bool = False
    token_local: bool = False
    paired: bool = False
    states_only: bool = False
    top_k: int | None = None
    common: int | None = None
    squares: bool = False
    teaching: Teaching | None = None

    def options(self) -> HeadOptions:
        """Return how the head computes, whatever is kept for gradients."""
        return HeadOptions(
            temperature=self.temperature,
            chunk_tokens=self.settings.chunk_tokens,
            fp32_logits=self.fp32_logits,
            entropy_needs_grad=self.entropy_needs_grad,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStates:
    """The hidden states that predict the labels: [N, H], or this rank's part of them under sequence parallelism."""

    hidden: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSquares:
    """Log-probs and entropies [N] as in `TokenLogprobs`, and Σ p² [N] over what each label was sampled from."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    squares: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TopTokens:
    """Log-probs and entropies [N] as in `TokenLogprobs`, and the likeliest tokens with their log-probs, [N, k] each."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyHead:
    """A rank's rows of the output weight [V/tp, H], padding included, and the process groups that it is sharded
    over.

    logit_cap: c if the model's logits are c·tanh(h·Wᵀ/c). logits_divisor: what the model divides its logits by; this
    is one more temperature.
    """

    weight: torch.Tensor
    shard: VocabShard
    cp_group: dist.ProcessGroup
    sequence_parallel: bool
    logit_cap: float | None = None
    logits_divisor: float = 1.0

    def __call__(
        self,
        hidden: torch.Tensor,
        pack: Pack,
        request: HeadRequest,
        loss_gradients: LossGradients | None,
        teacher: TeacherLogits | None = None,
    ) -> TokenLogprobs | TokenPairs | TokenStates | TokenSquares | TopTokens | DistilledLogprobs:
        """Compute the log-probs of the labels under the loss mask, from hidden states [T, 1, H] ([T/tp, 1, H] with
        sequence parallelism).

        Hidden states outside the loss mask, such as those of prompts, are dropped before the gather and the head.
        """
        positions, counts = pack.positions, None
        if self.sequence_parallel:
            rank, counts = self.shard.group.rank(), pack.kept_per_rank
            positions = positions.split(counts)[rank] - rank * len(hidden)
        own = hidden[positions, 0]
        if request.states_only:
            return TokenStates(hidden=own)
        if request.top_k is not None:
            return self._likeliest(own, counts, pack, request, request.top_k)
        if request.paired:
            return self._pairs(own, counts, pack, request)
        if request.squares:
            return self._squares(own, counts, pack, request)
        memory_mode = HeadMemoryMode.RECOMPUTE
        if torch.is_grad_enabled():
            itemsize = 4 if request.fp32_logits else self.weight.element_size()
            memory_mode = choose_memory_mode(
                request.settings.regime,
                logits_bytes=len(pack.labels) * len(self.weight) * itemsize,
                memory_bytes=request.settings.memory_mib << 20,
                token_local=request.token_local,
            )
        options = replace(
            self._options(request),
            memory_mode=memory_mode,
            loss_gradients=loss_gradients if memory_mode is HeadMemoryMode.IN_CHUNK else None,
            main_grad=getattr(self.weight, "main_grad", None) if torch.is_grad_enabled() else None,
            # Picking positions has made a copy, which may be overwritten.
            overwrite_hidden=True,
            row_counts=counts,
        )
        if request.teaching is None:
            shard = self.shard.first(request.common)
            return vocab_parallel_logprobs(
                own, self.weight, pack.labels, shard=shard, options=options, nucleus=pack.nucleus
            )
        return vocab_parallel_divergence(
            own,
            self.weight,
            pack.labels,
            shard=self.shard,
            options=options,
            nucleus=pack.nucleus,
            teacher=self._likely(pack, request.teaching) if teacher is None else teacher,
            divergence=Divergence(request.teaching.divergence),
            beta=request.teaching.beta,
        )

    def _likeliest(
        self, own: torch.Tensor, counts: tuple[int, ...] | None, pack: Pack, request: HeadRequest, top_k: int
    ) -> TopTokens:
        """Find the likeliest tokens in place of each label."""
        hidden, options = RowOwners(group=self.shard.group, counts=counts).gather(own), self._options(request)
        shard = self.shard.first(request.common)
        plain, top = vocab_parallel_top_logprobs(
            hidden, self.weight, pack.labels, shard=shard, top_k=top_k, options=options
        )
        return TopTokens(logprobs=plain.logprobs, entropy=plain.entropy, top_ids=top.ids, top_logprobs=top.logprobs)

    @torch.no_grad()
    def _squares(
        self, own: torch.Tensor, counts: tuple[int, ...] | None, pack: Pack, request: HeadRequest
    ) -> TokenSquares:
        hidden, options = RowOwners(group=self.shard.group, counts=counts).gather(own), self._options(request)
        shard = self.shard.first(request.common)
        x = head_inputs(hidden, self.weight, pack.labels, shard=shard, options=options, nucleus=pack.nucleus)
        found = row_statistics(x, squares=True)
        assert found.squares is not None
        return TokenSquares(logprobs=found.logprobs, entropy=found.entropy, squares=found.squares)

    @staticmethod
    def _likely(pack: Pack, teaching: Teaching) -> TopLogits | RecordedHead:
        """Return the likeliest tokens that a teacher or engine gave for a pack; a pack without labels has none."""
        ids, logprobs = pack.likely_ids, pack.likely_logprobs
        if ids is None or logprobs is None:
            assert not len(pack.labels), "rows lack the likeliest tokens"
            ids = logprobs = torch.zeros(0, 1, device=pack.labels.device)
        if teaching.measure is not None:
            return RecordedHead(logprobs=logprobs, ids=ids.long(), measure=teaching.measure)
        return TopLogits(logprobs=logprobs, ids=ids.long(), common=teaching.common)

    def _options(self, request: HeadRequest) -> HeadOptions:
        temperature = request.temperature * self.logits_divisor
        return replace(request.options(), temperature=temperature, logit_cap=self.logit_cap)

    def _pairs(self, own: torch.Tensor, counts: tuple[int, ...] | None, pack: Pack, request: HeadRequest) -> TokenPairs:
        """Compute log-probs and KLs of rows and their twins (same responses, other prompts) on every context-parallel
        rank.
        """
        assert pack.nucleus is None, "pairs are compared over the whole vocabulary; the configuration refuses others"
        gathered = RowOwners(group=self.shard.group, counts=counts).gather(own)
        owners = uneven_owners(len(pack.labels), self.cp_group, own.device)
        states, labels, rows, columns = (
            owners.gather(values) for values in (gathered, pack.labels, pack.row_index, pack.column_index)
        )
        # Labels of the first half by row and column, then those of the second half in the same order.
        first, second = torch.argsort(rows * pack.batch_shape[1] + columns).chunk(2)
        x = head_inputs(states, self.weight, labels, shard=self.shard, options=self._options(request))
        found = pair_statistics(x, first, second)
        return TokenPairs(
            logprobs=owners.own(found.logprobs), entropy=owners.own(found.entropy), kl=owners.own(found.kl)
        )
