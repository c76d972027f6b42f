"""From configuration to algorithm."""

from megarl.algos.composed import ComposedAlgorithm
from megarl.config.schema import AlgoConfig
from megarl.types import Algorithm


def build_algorithm(cfg: AlgoConfig, *, max_response_tokens: int) -> Algorithm:
    """The algorithm that `cfg` describes; ConfigError for unknown names and conflicts."""
    horizon = cfg.aggregation_horizon_tokens
    return ComposedAlgorithm(cfg=cfg, horizon_tokens=max_response_tokens if horizon is None else horizon)
