"""gpt-oss on megarl's own layers, also where Transformer Engine is installed: sinks and windows in bfloat16.

`MEGARL_DEVICE=cpu` runs it on a CPU.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.bf16_parity import FAMILIES, assert_as_close_as_transformers
from tests.helpers.cuda import missing_devices
from tests.helpers.hf_models import make_model
from tests.helpers.rank_pool import RankPool

_ON_CPU = os.environ.get("MEGARL_DEVICE") == "cpu"

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not _ON_CPU and bool(missing_devices(1)), reason=missing_devices(1))]


@pytest.fixture
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    if not _ON_CPU:
        get: Callable[[int], RankPool] = request.getfixturevalue("local_pool")
        yield get(1)
        return
    with RankPool(1, timeout_s=180.0) as own:
        yield own


# Megarl's attention takes other kernels for windows of some layers than for none.
@pytest.mark.parametrize("window", [7, 128])
def test_sinks_and_windows_in_bfloat16_are_rounding_alone(pool: RankPool, tmp_path: Path, window: int) -> None:
    sizes = {**FAMILIES["gpt_oss"], "sliding_window": window}
    path = make_model(tmp_path / "model", "gpt_oss", tied=False, dtype="bfloat16", **sizes)
    assert_as_close_as_transformers(pool, path, tmp_path)
