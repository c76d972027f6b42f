"""What a run's configuration makes of its engine."""

import pytest

from megarl.config import Config, from_dict
from megarl.rollout.engine import engine_spec


@pytest.mark.parametrize(
    ("deterministic", "asked", "cached"), [(False, True, True), (False, False, False), (True, True, False)]
)
def test_a_deterministic_run_has_no_prefix_cache(deterministic: bool, asked: bool, cached: bool) -> None:
    engine = {"prefix_caching": asked, "max_num_seqs": 3}
    config = from_dict(Config, {"run": {"deterministic": deterministic}, "rollout": {"engine": engine}})
    spec = engine_spec(config)
    assert spec.config.prefix_caching is cached
    assert spec.config.max_num_seqs == 3
