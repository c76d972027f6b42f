"""Which tokens attend to which in packs of rows that share prefixes: calls and gathered keys, worked out by hand."""

import sys
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megarl.parallel.attention import gathering_attention
from megarl.parallel.attention_plan import gather_keys, plan_attention
from megarl.parallel.packing import PackSeqParams

CPU = torch.device("cpu")


def test_keys_are_gathered_for_rows_with_a_part_of_their_own() -> None:
    """Rows of 4 tokens, of 2 shared and 1 own, wholly inside another, and of 4 shared and 2 own; a filler of 1."""
    sequences = [np.array(row) for row in ([0, 1, 2, 3], [0, 1, 4], [0, 1, 4], [0, 1, 2, 3, 5, 6], [7])]
    found = gather_keys(sequences, np.array([4, 1, 0, 2, 1]), CPU)
    assert found.keys.tolist() == [0, 1, 2, 3, 0, 1, 4, 0, 1, 2, 3, 5, 6, 7]
    assert (found.query_bounds.tolist(), found.query_bounds.dtype) == ([0, 4, 5, 7, 8], torch.int32)
    assert (found.key_bounds.tolist(), found.key_bounds.dtype) == ([0, 4, 7, 13, 14], torch.int32)
    assert (found.max_queries, found.max_keys) == (4, 6)


def test_calls_by_hand() -> None:
    """A root of 33 tokens; branches of 2 and 3 behind it, from token 32 on; one of 40 is computed whole."""
    root = list(range(33))
    sequences = [
        np.array(row) for row in (root, [*root, 33, 34], root, [*root, 35, 36, 37], [*root, *range(38, 78)], [78])
    ]
    plan = plan_attention(sequences, np.array([33, 2, 0, 3, 40, 1]), CPU)
    whole, long, filler, branches = plan.calls
    assert whole.queries.tolist() == whole.keys.tolist() == [root]
    assert long.queries.tolist() == long.keys.tolist() == [[*root, *range(38, 78)]]
    assert filler.queries.tolist() == [[78]]
    assert whole.seen is long.seen is filler.seen is None
    # The shorter repeats its last token.
    assert branches.queries.tolist() == [[32, 33, 34, 34], [32, 35, 36, 37]]
    assert branches.keys.tolist() == [[*root, 33, 34, 34], [*root, 35, 36, 37]]
    assert branches.seen is not None
    assert branches.seen.sum(1).tolist() == [33, 34, 35, 36]
    assert bool(branches.seen[2, :35].all())
    # Each token's output is one of those computed for it.
    outputs = torch.cat([call.queries.flatten() for call in plan.calls])
    assert outputs[plan.places].tolist() == list(range(79))


@pytest.mark.parametrize("cp_rank", [None, 0, 1])
def test_tokens_of_an_image_see_all_of_it_by_hand(cp_rank: int | None) -> None:
    """A row of 8 tokens with images at 1 to 3 and 5; a row of 8 without any; and, unless ranks split rows, one of 4
    that ends with an image.
    """
    sequences = [np.arange(8), np.arange(8, 16)]
    images = np.array([0, 2, 2, 2, 0, 6, *[0] * 11, 18, 18, 18])
    split = {} if cp_rank is None else {"cp": 2, "cp_rank": cp_rank}
    if cp_rank is None:
        sequences.append(np.arange(16, 20))
    lengths = np.array([8, 8, 4][: len(sequences)])
    plan = plan_attention(sequences, lengths, CPU, images=images[: lengths.sum()], **split)
    call = plan.calls[0]
    own = [*range(8)] if cp_rank is None else [[0, 1, 6, 7], [2, 3, 4, 5]][cp_rank]
    expected = np.zeros((8, 8), bool)
    expected[1:4, 1:4] = expected[5, 5] = True
    assert call.within is not None
    assert call.within[0].tolist() == expected[own].tolist()
    assert not call.within[1].any()
    if cp_rank is None:
        # Its last token is repeated, but not as the image's.
        assert call.within[2, :4].sum() == 9
        assert bool(call.within[2, 1:4, 1:4].all())


class DefinedAttention:
    """Transformer Engine's attention of packed sequences whose queries are the last of their keys, as it is defined."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        attn_mask_type: Enum,
        *,
        packed_seq_params: Any,
    ) -> torch.Tensor:
        asked = packed_seq_params
        assert (asked.qkv_format, attn_mask_type.name) == ("thd", "padding_causal_bottom_right")
        outputs = []
        for i in range(len(asked.cu_seqlens_q) - 1):
            here, path = (slice(*bounds[i : i + 2].tolist()) for bounds in (asked.cu_seqlens_q, asked.cu_seqlens_kv))
            scores = torch.einsum("nhd,mhd->hnm", query[here], key[path]) / query.shape[-1] ** 0.5
            n, m = scores.shape[1:]
            assert n <= asked.max_seqlen_q
            assert m <= asked.max_seqlen_kv
            hidden = torch.ones(n, m, dtype=torch.bool).triu(m - n + 1)
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            outputs.append(torch.einsum("hnm,mhd->nhd", weights, value[path]))
        return torch.cat(outputs)


def test_gathered_keys_under_the_bottom_right_mask_equal_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Transformer Engine is asked for, against the calls of megarl's own attention."""
    extensions = SimpleNamespace(TEDotProductAttention=DefinedAttention)
    monkeypatch.setitem(sys.modules, "megatron.core.extensions.transformer_engine", extensions)
    rng = np.random.default_rng(0)
    sequences, lengths = [np.arange(21)], [21]
    for own in (3, 1, 18, 7, 30):
        holder = sequences[rng.integers(len(sequences))]
        start = sum(lengths)
        sequences.append(np.concatenate([holder[: rng.integers(1, len(holder) + 1)], np.arange(start, start + own)]))
        lengths.append(own)
    q, k, v = (torch.randn(sum(lengths), 2, 4, dtype=torch.float64) for _ in range(3))
    pack: Any = SimpleNamespace(gathered=gather_keys(sequences, np.array(lengths), CPU))
    attention = gathering_attention.__wrapped__()()
    outputs = attention.forward(q, k, v, None, "padding_causal", packed_seq_params=PackSeqParams(pack=pack))
    plan = plan_attention(sequences, np.array(lengths), CPU)
    computed = []
    for call in plan.calls:
        mine, its, theirs = (
            x[places].transpose(1, 2) for x, places in ((q, call.queries), (k, call.keys), (v, call.keys))
        )
        out = F.scaled_dot_product_attention(mine, its, theirs, attn_mask=call.seen, is_causal=call.seen is None)
        computed.append(out.transpose(1, 2).flatten(0, 1))
    torch.testing.assert_close(outputs, torch.cat(computed)[plan.places], rtol=0, atol=1e-12)
