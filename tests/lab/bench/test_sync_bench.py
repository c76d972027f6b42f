"""What the sync benchmark's own contenders move between four ranks, which are threads here."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from megarl.host.store import open_store
from megarl_lab.bench.sync import PEER, TIME_LIMITS, SyncCost, faults, lacking_bytes
from megarl_lab.bench.sync_contenders import Rank, SyncContender, SyncJob, bridge
from megarl_lab.bench.sync_model import CASES, NUM_RANKS, check, make_model, model_sizes, shards


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
def test_every_rank_gets_its_shards_and_lacks_no_byte_more(case: str, transport: str, tmp_path: Path) -> None:
    store = open_store("127.0.0.1")
    job = SyncJob(
        contenders=(),
        case=case,
        width=16,
        num_layers=2,
        rounds=1,
        bucket_bytes=4096,
        port=store.port,
        directory=str(tmp_path),
    )
    model = make_model(case, job.width, job.num_layers)

    def rank(number: int) -> Rank:
        got = {name: torch.full([b - a for a, b in box], torch.nan) for name, box in model.wanted(number).items()}
        return Rank(job=job, number=number, model=model, held=shards(model, number), got=got)

    ranks = [rank(number) for number in range(NUM_RANKS)]
    with ThreadPoolExecutor(NUM_RANKS) as pool:
        contenders: list[SyncContender] = list(pool.map(lambda each: bridge(transport, each), ranks, timeout=60))
        for turn in (1, 2):
            for shard in (shard for each in ranks for shard in each.held.values()):
                shard.add_(1.0)
            list(pool.map(lambda each: each.sync(), contenders, timeout=60))
            for each in ranks:
                check(model, each.number, each.got, float(turn))
    assert sum(each.traffic()[0] for each in contenders) == lacking_bytes(case, model.num_bytes)


def test_sizes_of_models() -> None:
    """Twelve squares of the width, of four bytes each, a layer."""
    assert model_sizes(4 * 12 * 16 * 512 * 512, 16) == 512


@pytest.mark.parametrize("contender", TIME_LIMITS)
@pytest.mark.parametrize(("share", "failing"), [(0.95, 0), (1.05, 1)])
def test_no_contender_of_ours_may_take_longer_than_its_limit(contender: str, share: float, failing: int) -> None:
    """Of 16 bytes a quarter is lacking on each of four ranks; megatron-core takes 1 s."""

    def measured(name: str) -> SyncCost:
        return SyncCost(
            case="TP4 → 2 × TP2, overlapping",
            model_bytes=16,
            contender=name,
            wire_bytes=16,
            messages=16 if name in TIME_LIMITS else 128,
            staging_mib=1.0 if name in TIME_LIMITS else 2.0,
            seconds=share * TIME_LIMITS[name] if name == contender else 1.0 if name == PEER else 0.5,
        )

    found = faults([measured(name) for name in (*TIME_LIMITS, PEER)])
    assert [each.startswith(f"{contender}: time ÷ megatron-core's") for each in found] == [True] * failing
