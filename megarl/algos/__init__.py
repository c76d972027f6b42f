"""Define RL algorithms as pure functions of log-probs, rewards and masks.

An algorithm combines an advantage estimator, a policy loss, a KL estimator and an aggregation of token losses. Each is
chosen by name from a registry of functions. None of them depends on processes, devices, parallel layouts or packing.

`tests/unit/algos/test_examples.py` runs the examples in docstrings. They create float64 tensors with `tensor`, and
inputs with the other short names that `tests/helpers/examples.py` defines.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megarl.algos.build import build_algorithm
    from megarl.algos.composed import ComposedAlgorithm
    from megarl.algos.mismatch import MismatchSums, mismatch_sums
    from megarl.algos.objectives import SftAlgorithm

__all__ = ["ComposedAlgorithm", "MismatchSums", "SftAlgorithm", "build_algorithm", "mismatch_sums"]

if not TYPE_CHECKING:  # with it, a type checker would accept any name

    def __getattr__(name: str) -> object:
        """Import an exported name on first use, so that processes without torch can import this package."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from megarl.algos import build, composed, mismatch, objectives

        return next(
            getattr(module, name) for module in (build, composed, mismatch, objectives) if hasattr(module, name)
        )
