"""RL algorithms as pure functions of log-probs, rewards and masks.

An algorithm is a composition of named choices (advantage estimator × policy loss × KL × aggregation); each
choice is a registry of functions. Nothing here knows of processes, devices, layouts or packing.
"""

from megarl.algos.build import build_algorithm
from megarl.algos.composed import ComposedAlgorithm
from megarl.algos.mismatch import MismatchSums, mismatch_sums
from megarl.algos.sft import SftAlgorithm

__all__ = ["ComposedAlgorithm", "MismatchSums", "SftAlgorithm", "build_algorithm", "mismatch_sums"]
