"""Define the configuration sections below `algo:`, whose settings together make up an RL algorithm."""

from megarl.config.algo.compose import AlgoConfig, KLConfig, PolicyLossConfig
from megarl.config.algo.cpo import CpoConfig, HintConfig
from megarl.config.algo.distill import DistillConfig
from megarl.config.algo.luffy import DemonstrationConfig, OffPolicyConfig
from megarl.config.algo.reinforce import AdvantageConfig, CorrectionConfig
from megarl.config.algo.reward import FilterConfig, RewardConfig, RewardMaskConfig

__all__ = [
    "AdvantageConfig",
    "AlgoConfig",
    "CorrectionConfig",
    "CpoConfig",
    "DemonstrationConfig",
    "DistillConfig",
    "FilterConfig",
    "HintConfig",
    "KLConfig",
    "OffPolicyConfig",
    "PolicyLossConfig",
    "RewardConfig",
    "RewardMaskConfig",
]
