"""RL algorithms as pure functions of log-probs, rewards and masks.

An algorithm is a composition of named choices (advantage estimator × policy loss × KL × aggregation); each
choice is a registry of functions. Nothing here knows of processes, devices, layouts or packing.

Examples in docstrings are run by `tests/unit/algos/test_examples.py`. They make tensors of float64 with `tensor`, and
inputs with the other short names of `tests/helpers/examples.py`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megarl.algos.build import build_algorithm
    from megarl.algos.composed import ComposedAlgorithm
    from megarl.algos.mismatch import MismatchSums, mismatch_sums
    from megarl.algos.sft import SftAlgorithm

__all__ = ["ComposedAlgorithm", "MismatchSums", "SftAlgorithm", "build_algorithm", "mismatch_sums"]

if not TYPE_CHECKING:  # a checker would take any name for known

    def __getattr__(name: str) -> Any:
        """Import an exported name on first use: `megarl.registry` serves processes that do without torch."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from megarl.algos import build, composed, mismatch, sft

        return next(getattr(module, name) for module in (build, composed, mismatch, sft) if hasattr(module, name))
