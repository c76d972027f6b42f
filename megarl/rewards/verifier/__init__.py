"""A pool of worker processes that judge responses: no text can stop, slow or end a run. See docs/rewards/verifier.md.

    with VerifierPool(VerifierOptions(num_workers=4)) as pool:
        job = VerifierJob(data_source="math", response="…", ground_truth="1/2", function="module:function")
        result = pool.submit(job).result()

A caller decides what a result without a reward (`timed_out`, `crashed`) is worth; the pool does not invent scores.
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
