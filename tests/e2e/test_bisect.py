"""`megarl bisect` with an engine of vLLM and a rank: faults of the engine are named, and nothing without one."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.bisect.rules import Weights, merged_record
from megarl.bisect.search import ENGINE, TRAINER, search
from megarl.cluster.roles import engine_spec
from megarl.config.schema import LayoutConfig
from megarl.types.passes import RecordedPass
from megarl.weights.families import read_model_spec
from tests.e2e import engines
from tests.e2e.support import small_config
from tests.e2e.test_family_engines import make_engine_model, trained_copy
from tests.helpers.checkpoints import VOCAB_SIZE
from tests.helpers.faults import FAULTS, Place, faulty_copy
from tests.helpers.rank_pool import RankPool
from tests.helpers.recorded_passes import make_row, record_ranks

ROW = make_row(40, VOCAB_SIZE)
FLOAT32 = {ENGINE: "float32", TRAINER: "float32"}
AT = Place(layer=2, seed=7)


@pytest.mark.parametrize(
    ("family", "kind", "where"),
    [
        ("qwen3", "rope theta", "layer 0, rotary positions of queries"),
        pytest.param("gemma2", "window", "layer 0, attention", marks=pytest.mark.long),
        pytest.param("qwen2", "stale slice", "layer 2, ", marks=pytest.mark.long),
        pytest.param("qwen3", "one bit", "layer 2, ", marks=pytest.mark.long),
        pytest.param("gemma3", None, "", marks=pytest.mark.long),
    ],
)
def test_a_fault_of_the_engine_is_named(
    family: str,
    kind: str | None,
    where: str,
    engine_process: RankPool,
    rank_pool: Callable[[int], RankPool],
    tmp_path: Path,
) -> None:
    model = make_engine_model(tmp_path / "model", family)
    older = trained_copy(model, tmp_path / "older")
    theirs = model if kind is None else faulty_copy(model, older, FAULTS[kind], AT, tmp_path / "faulty")
    spec = engine_spec(small_config(theirs))
    parts = rank_pool(1).run(record_ranks, str(model), LayoutConfig(), ROW)
    (by_engine,) = engine_process.run(engines.recorded, spec, ROW.token_ids.tolist())
    described = read_model_spec(model)
    recorded = {
        ENGINE: merged_record(described, by_engine, ROW.num_tokens, scales_turned=True),
        TRAINER: merged_record(described, parts, ROW.num_tokens),
    }
    sides = {side: RecordedPass(token_ids=ROW.token_ids, values=values) for side, values in recorded.items()}
    finding = search(Weights.read(model), sides, dtypes=FLOAT32, older=[Weights.read(older)])
    if kind is None:
        assert finding is None, finding.lines
        return
    assert finding is not None
    assert finding.side == ENGINE
    assert str(finding.place).startswith(where)
    assert finding.cause is not None
    assert finding.cause.name in FAULTS[kind].names, finding.lines
