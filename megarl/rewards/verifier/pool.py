"""Provide a pool of worker processes in which scorers judge responses."""

import pickle
import weakref
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import AbstractContextManager

from megarl.rewards.verifier.fleet import PendingJob
from megarl.rewards.verifier.supervisor import Supervisor
from megarl.rewards.verifier.types import JobResult, VerifierJob, VerifierOptions, VerifierStatistics


class VerifierPool(AbstractContextManager["VerifierPool"]):
    """A pool of worker processes that run scorers, each job within its deadline.

    Any thread of any process may make a pool, and any threads may share it. A job that hangs, crashes or exhausts
    memory loses only its own result. The workers end with the pool, and with the process that made it, however
    that ends. A pool needs Linux 5.4 or newer.
    """

    def __init__(self, options: VerifierOptions | None = None) -> None:
        """Start the workers without waiting for them. Submitted jobs wait until a worker is ready."""
        self._options = options or VerifierOptions()
        self._supervisor = Supervisor(self._options)
        # Also stops the thread when the pool is garbage-collected, and at the interpreter's exit.
        self._finalizer = weakref.finalize(self, self._supervisor.stop)

    def submit(self, job: VerifierJob) -> Future[JobResult]:
        """Return a future of the result of `job`, without waiting; jobs begin in the order of submission.

        The future raises DataError for a malformed ground truth, ConfigError if `job.function` cannot be imported or
        is not a scorer, NonFiniteError if it returned such a score, WorkerError if workers cannot be started at all,
        RuntimeError if the pool was closed first. It can be cancelled until its job runs. Its callbacks are called in
        the pool's thread, so they must not wait. This method raises RuntimeError if the pool is closed.
        """
        response = job.response[-self._options.max_response_chars :]
        contents = (job.function, response, job.ground_truth, dict(job.extra_info), dict(job.arguments))
        pending = PendingJob(
            message=pickle.dumps(contents),
            function=job.function,
            shortened=len(response) < len(job.response),
            deadline_s=job.deadline_s or self._options.deadline_s,
            future=Future(),
        )
        self._supervisor.submit(pending)
        return pending.future

    def score_all(self, jobs: Iterable[VerifierJob]) -> list[JobResult]:
        """Run the jobs and return their results in the same order; raise the error of the first job that fails."""
        futures = [self.submit(job) for job in jobs]
        return [future.result() for future in futures]

    def statistics(self) -> VerifierStatistics:
        """Return counts of the results since the pool was created."""
        return self._supervisor.statistics

    def close(self) -> None:
        """End the workers and wait until they have ended; unfinished jobs raise RuntimeError."""
        self._finalizer()

    def __exit__(self, *_: object) -> None:
        self.close()
