"""`megarl bisect` names what is wrong, by a seeded list of faults, and nothing where nothing is."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from megarl.bisect.rules import Weights, merged_record
from megarl.bisect.search import ENGINE, TRAINER, Discrepancy, search
from megarl.config.schema import LayoutConfig
from megarl.types.passes import RecordedPass
from megarl.weights.families import read_model_spec
from tests.helpers.faults import FAMILIES, FAULTS, Drawn, draw, faulty_copy
from tests.helpers.hf_models import VOCAB_SIZE, make_model
from tests.helpers.rank_pool import RankPool
from tests.helpers.recorded_passes import make_row, record_ranks, record_transformers

GetPool = Callable[[int], RankPool]
SEED, NUM_FAULTS, MOST_WRONG = 65, 30, 3
FLOAT32 = {ENGINE: "float32", TRAINER: "float32"}
# Longer than windows and the keys of a stale cache.
ROW = make_row(40, VOCAB_SIZE)
LAYOUTS = {1: LayoutConfig(), 2: LayoutConfig(tp=2, sequence_parallel=True)}
QUICK = 5


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Path]:
    """The model of a family, or the same with other weights."""
    root = tmp_path_factory.mktemp("models")

    def model(family: str, older: bool = False) -> Path:
        path = root / f"{family}{'-older' if older else ''}"
        if not path.exists():
            make_model(path, family, tied=False, seed=int(older))
        return path

    return model


def recorded_by_ranks(pool: RankPool, path: Path, tp: int) -> RecordedPass:
    parts = pool.run(record_ranks, str(path), LAYOUTS[tp], ROW)
    return RecordedPass(token_ids=ROW.token_ids, values=merged_record(read_model_spec(path), parts, ROW.num_tokens))


def find(pool: RankPool, models: Callable[..., Path], drawn: Drawn, target: Path) -> Discrepancy | None:
    model, older, fault = models(drawn.family), models(drawn.family, older=True), FAULTS[drawn.kind]
    faulty = faulty_copy(model, older, fault, drawn.place, target)
    sides = {side: faulty if side == drawn.side else model for side in (ENGINE, TRAINER)}
    mistaken = None if fault.model is None else partial(_call, fault.model, drawn)
    recorded = {
        ENGINE: record_transformers(sides[ENGINE], ROW, mistaken=mistaken, **fault.recorded),
        TRAINER: recorded_by_ranks(pool, sides[TRAINER], drawn.tp),
    }
    return search(Weights.read(model), recorded, dtypes=FLOAT32, older=[Weights.read(older)])


def _call(change: Callable[..., None], drawn: Drawn, hf: object) -> None:
    change(hf, drawn.place)


def is_right(drawn: Drawn, finding: Discrepancy | None) -> bool:
    return (
        finding is not None
        and finding.cause is not None
        and finding.side == drawn.side
        and finding.cause.name in FAULTS[drawn.kind].names
    )


@pytest.mark.parametrize("drawn", draw(SEED, NUM_FAULTS)[:QUICK], ids=lambda d: f"{d.kind}-{d.family}")
def test_a_fault_is_named(rank_pool: GetPool, models: Callable[..., Path], drawn: Drawn, tmp_path: Path) -> None:
    finding = find(rank_pool(drawn.tp), models, drawn, tmp_path / "faulty")
    assert is_right(drawn, finding), finding and finding.lines


@pytest.mark.long
def test_faults_of_the_list_are_named(rank_pool: GetPool, models: Callable[..., Path], tmp_path: Path) -> None:
    drawn = draw(SEED, NUM_FAULTS)
    found = [find(rank_pool(each.tp), models, each, tmp_path / str(i)) for i, each in enumerate(drawn)]
    wrong = [
        (each, finding and finding.lines)
        for each, finding in zip(drawn, found, strict=True)
        if not is_right(each, finding)
    ]
    assert len(wrong) <= MOST_WRONG, wrong


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.long)])
def test_nothing_is_named_where_nothing_is_wrong(rank_pool: GetPool, models: Callable[..., Path], tp: int) -> None:
    for family in FAMILIES:
        recorded = {
            ENGINE: record_transformers(models(family), ROW),
            TRAINER: recorded_by_ranks(rank_pool(tp), models(family), tp),
        }
        assert search(Weights.read(models(family)), recorded, dtypes=FLOAT32) is None, family
