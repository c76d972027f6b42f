"""What an algorithm is composed of: one module per family of choices, all under `algo:`."""

from megarl.config.algo.compose import AlgoConfig, KLConfig, PolicyLossConfig
from megarl.config.algo.cpo import CpoConfig, HintConfig
from megarl.config.algo.luffy import DemonstrationConfig, OffPolicyConfig
from megarl.config.algo.reinforce import AdvantageConfig, CorrectionConfig
from megarl.config.algo.reward import FilterConfig, RewardConfig, RewardMaskConfig

__all__ = [
    "AdvantageConfig",
    "AlgoConfig",
    "CorrectionConfig",
    "CpoConfig",
    "DemonstrationConfig",
    "FilterConfig",
    "HintConfig",
    "KLConfig",
    "OffPolicyConfig",
    "PolicyLossConfig",
    "RewardConfig",
    "RewardMaskConfig",
]
