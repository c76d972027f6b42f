"""What the sync benchmark's own contenders move between four ranks, which are threads here."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from megarl.parallel.weights.collective import open_store
from tools.bench.sync import lacking_bytes
from tools.bench.sync_contenders import Contender, Job, Rank, bridge
from tools.bench.sync_model import CASES, NUM_RANKS, check, make_model, model_sizes, shards

WIRES = [("shared_memory", False), ("gloo", False), ("gloo", True)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("wire", "full_shape"), WIRES)
def test_every_rank_gets_its_shards_and_lacks_no_byte_more(
    case: str, wire: str, full_shape: bool, tmp_path: Path
) -> None:
    store = open_store("127.0.0.1")
    job = Job(
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
        contenders: list[Contender] = list(
            pool.map(lambda each: bridge(wire, each, full_shape=full_shape), ranks, timeout=60)
        )
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
