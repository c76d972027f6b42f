"""Judges responses in processes of their own."""

import pickle
import weakref
from collections.abc import Iterable
from concurrent.futures import Future
from types import TracebackType

from megarl.rewards.verifier.fleet import Task
from megarl.rewards.verifier.supervisor import Supervisor
from megarl.rewards.verifier.types import Verdict, VerifierJob, VerifierOptions, VerifierStatistics


class VerifierPool:
    """Scorers in worker processes, each job within its deadline.

    Any thread of any process may make a pool, and any threads may share it. A job that hangs, crashes or eats memory
    costs its own verdict and nothing else. The workers end with the pool, and with the process that made it, however
    that ends. Needs Linux 5.4 or newer.
    """

    def __init__(self, options: VerifierOptions | None = None) -> None:
        """Returns at once; jobs wait until the first worker is ready."""
        self._options = options or VerifierOptions()
        self._supervisor = Supervisor(self._options)
        # Also of a pool that nobody refers to any more, and at the interpreter's exit.
        self._finalizer = weakref.finalize(self, self._supervisor.stop)

    def submit(self, job: VerifierJob) -> Future[Verdict]:
        """The verdict on `job`, when it is there; never waits. Jobs are begun in the order of their submission.

        The future raises DataError for a malformed ground truth, ConfigError if `job.function` cannot be imported or
        is no scorer, NonFiniteError if it returned such a score, WorkerError if workers cannot be started at all,
        RuntimeError if the pool was closed first. It can be cancelled until it runs. Its callbacks are called in the
        pool's thread, so they must not wait. RuntimeError if the pool is closed.
        """
        response = job.response[-self._options.max_response_chars :]
        contents = (job.function, response, job.ground_truth, dict(job.extra_info), dict(job.arguments))
        task = Task(
            message=pickle.dumps(contents),
            function=job.function,
            shortened=len(response) < len(job.response),
            future=Future(),
        )
        self._supervisor.submit(task)
        return task.future

    def score_all(self, jobs: Iterable[VerifierJob]) -> list[Verdict]:
        """The verdicts in the order of `jobs`; raises what the first future that fails raises."""
        futures = [self.submit(job) for job in jobs]
        return [future.result() for future in futures]

    def statistics(self) -> VerifierStatistics:
        """Counts of what was judged until now."""
        return self._supervisor.statistics

    def close(self) -> None:
        """Ends the workers and waits until they are gone; jobs without a verdict raise RuntimeError."""
        self._finalizer()

    def __enter__(self) -> "VerifierPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
