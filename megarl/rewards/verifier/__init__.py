"""Judge responses in a pool of worker processes, so that no text can stall or end a run. See docs/rewards.md.

    with VerifierPool(VerifierOptions(num_workers=4)) as pool:
        job = VerifierJob(data_source="math", response="…", ground_truth="1/2", function="module:function")
        result = pool.submit(job).result()

A result without a reward has the outcome `timed_out` or `crashed`. The caller then decides the score, not the pool.
"""

from megarl.rewards.verifier.pool import VerifierPool
from megarl.rewards.verifier.types import (
    JobOutcome,
    JobResult,
    VerifierJob,
    VerifierOptions,
    VerifierStatistics,
)

__all__ = [
    "JobOutcome",
    "JobResult",
    "VerifierJob",
    "VerifierOptions",
    "VerifierPool",
    "VerifierStatistics",
]
