"""Adapters on Transformer Engine's layers in bfloat16 are as close to float64 as those on megarl's own layers."""

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from megarl.config.schema import LayoutConfig
from tests.distributed.test_adapters import case_of, merged, rows_of, write_adapters
from tests.helpers.adapter_ranks import AdapterOutcome, run_adapters
from tests.helpers.bf16_parity import FAMILIES, TIMES_TRANSFORMERS
from tests.helpers.cuda import needs_devices
from tests.helpers.hf_models import make_model
from tests.helpers.rank_pool import RankPool

pytestmark = [
    pytest.mark.gpu,
    needs_devices(1),
    pytest.mark.skipif(find_spec("transformer_engine") is None, reason="needs Transformer Engine"),
]
GetPool = Callable[[int], RankPool]


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_adapters_in_bfloat16(gpu_pool: GetPool, local_pool: GetPool, tmp_path: Path, name: str) -> None:
    model = make_model(tmp_path / "model", name, tied=False, **FAMILIES[name])
    exact = merged(model, tmp_path / "adapters", write_adapters(tmp_path / "adapters", model), rows_of())
    case = case_of(exact, LayoutConfig())
    case = replace(case, model=replace(case.model, dtype="bfloat16"))

    def distance(outcome: AdapterOutcome) -> tuple[float, float]:
        apart = [np.abs(outcome.logprobs[i] - wanted.numpy()) for i, wanted in enumerate(exact.logprobs)]
        return float(np.concatenate(apart).mean()), abs(outcome.grad_norm / exact.grad_norm - 1)

    ours, local = (distance(pool(1).run(run_adapters, case)[0]) for pool in (gpu_pool, local_pool))
    print(f"log-probs and norm: on Transformer Engine {ours}, on megarl's layers {local}")
    assert 0 < ours[0] <= TIMES_TRANSFORMERS * local[0]
    # The norm's error is rounding of one number; it may be small by chance.
    assert ours[1] <= TIMES_TRANSFORMERS * local[1] + 0.01
