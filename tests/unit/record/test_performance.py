"""FLOPs counted by hand, and what is made of them."""

from dataclasses import replace

import numpy as np
import pytest

from megarl.config.schema import ActorConfig, LoggingConfig
from megarl.host.device.accelerators import Device
from megarl.host.device.platform import CpuPlatform
from megarl.parallel.backend import shares_prefixes
from megarl.record import performance
from megarl.record.performance import PerformanceMeter, forward_flops, image_flops, peak_of, token_times, update_flops
from megarl.types import Row, RowImage
from megarl.weights.dims import DeltaNet, Dims, Experts, LatentAttention
from megarl.weights.towers import Tower, TowerWork

# h 8, q 4·2 = 8, k 2·2 = 4, f 12, V 10, 3 layers.
DIMS = Dims(num_layers=3, hidden=8, ffn=12, num_heads=4, num_kv_heads=2, head_dim=2, vocab=10, tied=True)
# A layer's matrices: q and o 64 each, k and v 32 each, gate, up and down 96 each.
LAYER = 64 + 64 + 32 + 32 + 3 * 96
# 5 tokens: products, then attention (q·n² for scores and as much for values), then 2 labels at the head.
FORWARD_5_2 = 2 * 5 * 3 * LAYER + 3 * 2 * 8 * 25 + 2 * 2 * 10 * 8


def row(num_prompt_tokens: int, loss_mask: list[bool]) -> Row:
    return Row(
        uid="a",
        sample_index=0,
        token_ids=np.zeros(num_prompt_tokens + len(loss_mask), dtype=np.int64),
        num_prompt_tokens=num_prompt_tokens,
        loss_mask=np.array(loss_mask),
    )


def test_forward() -> None:
    assert forward_flops(DIMS, num_tokens=5, num_head_tokens=2) == FORWARD_5_2
    assert forward_flops(DIMS, num_tokens=1, num_head_tokens=0) == 2 * 3 * LAYER + 3 * 2 * 8


def test_only_experts_that_see_a_token_count() -> None:
    """Layers 0 and 2 have five experts of 4, two of which see a token, and shared ones of 6."""
    experts = Experts(num=5, per_token=2, ffn=4, normalized=True, layers=(0, 2), shared_ffn=6)
    with_experts = 64 + 64 + 32 + 32 + 3 * 8 * (2 * 4 + 6) + 8 * 5
    expected = 2 * 5 * (2 * with_experts + LAYER) + 3 * 2 * 8 * 25
    assert forward_flops(replace(DIMS, experts=experts), num_tokens=5, num_head_tokens=0) == expected


def test_latent_attention() -> None:
    """Four heads of 1 + 1 for scores and 3 for values; latents of 6 and 5."""
    latent = LatentAttention(q_latent=6, kv_latent=5, nope=1, rope=1, values=3)
    attention = 8 * 6 + 6 * 8 + 8 * (5 + 1) + 5 * 4 * (1 + 3) + 4 * 3 * 8
    expected = 2 * 5 * 3 * (attention + 3 * 96) + 3 * (8 + 12) * 25
    assert forward_flops(replace(DIMS, latent=latent), num_tokens=5, num_head_tokens=0) == expected
    # Queries without latents: one product with their four heads of two.
    without = replace(latent, q_latent=0)
    attention += 8 * 8 - 8 * 6 - 6 * 8
    expected = 2 * 5 * 3 * (attention + 3 * 96) + 3 * (8 + 12) * 25
    assert forward_flops(replace(DIMS, latent=without), num_tokens=5, num_head_tokens=0) == expected


def test_windows() -> None:
    """Layer 1 has 2·5 − 2²/2 = 8 pairs of tokens in place of 12.5; the window of layer 2 is wider than the row."""
    windowed = replace(DIMS, windows=(None, 2, 9))
    expected = FORWARD_5_2 - 4 * 8 * 12.5 + 4 * 8 * 8
    assert forward_flops(windowed, num_tokens=5, num_head_tokens=2) == expected


def test_gated_delta_nets() -> None:
    """Layers 0 and 2 have one, with two key heads of 3 and four value heads of 5 after convolutions of 4."""
    delta = DeltaNet(num_key_heads=2, num_value_heads=4, key_dim=3, value_dim=5, conv_width=4, layers=frozenset({0, 2}))
    # Queries, keys, values, gates and two numbers per value head; the product out.
    projections = 8 * (6 + 6 + 20 + 20 + 4 + 4) + 20 * 8
    # The state of a value head has 3·5 elements, which each token fades, corrects and reads.
    own = projections + 4 * (6 + 6 + 20) + 3 * 4 * 3 * 5
    gate = 8 * 8
    expected = 2 * 5 * (2 * (own + 3 * 96) + LAYER + gate) + 2 * 8 * 25
    assert forward_flops(replace(DIMS, delta=delta, gated=True), num_tokens=5, num_head_tokens=0) == expected


def test_update_is_three_forward_passes() -> None:
    rows = [row(2, [True, False, True]), row(1, [False])]
    assert update_flops(DIMS, rows) == 3 * (FORWARD_5_2 + 2 * 2 * 3 * LAYER + 3 * 2 * 8 * 4)


def test_shared_prefixes_count_once() -> None:
    """Rows of 5 and 3 equal tokens, and one of 5 that shares 1 with them: 5, then none, then what 1 of 5 leaves."""
    rows = [row(2, [True, False, True]), row(2, [True]), row(2, [True, False, True])]
    rows[2] = replace(rows[2], token_ids=np.array([0, 1, 2, 3, 4]))
    first = 2 * 3 * LAYER + 3 * 2 * 8
    head_of_one = 2 * 10 * 8
    expected = 3 * (2 * FORWARD_5_2 + head_of_one - first)
    assert update_flops(DIMS, rows, shares_prefixes=True) == expected
    # On CPUs, the meter counts so, unless the settings say otherwise.
    sharing, apart = (
        meter(shares_prefixes=shares_prefixes(ActorConfig(share_prefixes=shares))).metrics(rows, update_s=1.0)
        for shares in (None, False)
    )
    ratio = sharing["perf/tflops_per_rank"] / apart["perf/tflops_per_rank"]
    assert ratio == pytest.approx(expected / update_flops(DIMS, rows))


def test_each_different_image_is_read_once() -> None:
    """Two features of three patches each: 6 patches of 100 multiplications, in layers that see 6 and 4 of them, and 2
    features of 50; backward alone of these, which are the projector's.
    """
    work = TowerWork(
        patches=3,
        per_patch=100,
        per_feature=50,
        kept_per_patch=8,
        kept_per_feature=9,
        windows=(None, 4),
        width=7,
        features=1,
    )
    tower = Tower(part="projector", work=work, rules=(), trained=(), names={}, mrope=None)
    images = [RowImage(places=np.array([0, 1]), digest=digest) for digest in "ab"]
    rows = [replace(row(2, [True]), images=(images[i],)) for i in (0, 1, 0)]
    inner = 2 * 6 * 100 + 4 * 7 * 6 * (6 + 4)
    assert image_flops(tower, rows) == 2 * (inner + 2 * 2 * 50)
    assert update_flops(DIMS, rows, tower=tower) == update_flops(DIMS, rows) + 2 * (inner + 3 * 2 * 2 * 50)
    assert image_flops(tower, [row(2, [True])]) == image_flops(None, rows) == 0
    # Elements that are kept: of the projector's backward and of one layer at a time, or of all.
    assert [work.num_kept(2, part) for part in ("projector", "all")] == [2 * (3 * 4 + 9), 2 * (3 * 8 + 9)]


def meter(dtype: str = "bfloat16", *, shares_prefixes: bool = False, **logging: float) -> PerformanceMeter:
    peak = peak_of(LoggingConfig(**logging), dtype)
    return PerformanceMeter(DIMS, num_ranks=4, num_epochs=3, peak_tflops=peak, shares_prefixes=shares_prefixes)


def test_metrics_per_rank_and_over_epochs() -> None:
    rows = [row(3, [True, True])]
    measured = meter(peak_tflops=2e-6).metrics(rows, update_s=0.5)
    tflops = 3 * 3 * FORWARD_5_2 / 0.5 / 4 / 1e12
    assert measured == pytest.approx({"perf/tflops_per_rank": tflops, "perf/mfu": tflops / 2e-6})


def test_no_utilisation_without_a_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row(3, [True, True])]
    monkeypatch.setattr(performance, "platform", CpuPlatform)
    assert meter().metrics(rows, update_s=1.0).keys() == {"perf/tflops_per_rank"}
    device = Device(name="NVIDIA H100 80GB HBM3", memory_gib=80, driver="1")
    monkeypatch.setattr(CpuPlatform, "devices", lambda self: [device])
    measured = meter().metrics(rows, update_s=1.0)
    assert measured["perf/mfu"] == pytest.approx(measured["perf/tflops_per_rank"] / 989.4)
    assert "perf/mfu" not in meter("float32").metrics(rows, update_s=1.0)


def test_times_per_token() -> None:
    """Two rows of 10 and 20 tokens, of which 4 and 6 are response: 2 s of generation for 10 tokens, 3 s for 30."""
    rows = [row(6, [True] * 4), row(14, [True] * 6)]
    times = {"timing_s/gen": 2.0, "timing_s/update_actor": 3.0, "timing_s/testing": 9.0, "timing_s/step": 6.0}
    assert token_times(times, rows) == {
        "perf/tokens_per_s": 5.0,
        "timing_per_token_ms/gen": 200.0,
        "timing_per_token_ms/update_actor": 100.0,
    }
