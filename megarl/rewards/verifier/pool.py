"""Provide a pool of worker processes in which scorers judge responses. Its thread gives each worker one job at a time,
and kills workers that exceed a deadline.
"""

import os
import pickle
import selectors
import threading
import weakref
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, InvalidStateError
from contextlib import AbstractContextManager, suppress
from dataclasses import replace

from megarl.errors import WorkerError
from megarl.host.clock import awake_s
from megarl.rewards.verifier.fleet import Fleet, PendingJob, Worker
from megarl.rewards.verifier.types import (
    ERRORS,
    STARTED,
    JobResult,
    VerifierJob,
    VerifierOptions,
    VerifierStatistics,
    WorkerReply,
)


class Supervisor:
    """The thread of a pool. Its methods may be called from any thread, and only `stop` waits."""

    def __init__(self, options: VerifierOptions) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._waiting: deque[PendingJob] = deque()
        self._is_closing = False
        self._ended: Exception | None = None
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Replaced as a whole by the supervisor's thread, so that readers need no lock.
        self.statistics = VerifierStatistics()
        # The fork server and its workers die with this thread, so this thread starts and manages them.
        self._thread = threading.Thread(target=self._run, name="verifier-pool", daemon=True)
        self._thread.start()

    def submit(self, job: PendingJob) -> None:
        """Queue a job; RuntimeError if the pool is closed."""
        with self._lock:
            if self._is_closing or self._ended:
                raise RuntimeError("the verifier pool is closed; make another one") from self._ended
            self._waiting.append(job)
            os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """End all workers, and return when they have ended; unfinished jobs get a RuntimeError."""
        with self._lock:
            if not self._is_closing and not self._ended:
                self._is_closing = True
                os.eventfd_write(self._wake, 1)
        # The last reference to a pool may be dropped by a callback in this thread.
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        """Run the pool until it is closed: start workers, hand out jobs, read replies and enforce deadlines."""
        error: Exception = RuntimeError("the verifier pool's thread ended by an error; see standard error")
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ, lambda _: os.eventfd_read(self._wake))
            self._fleet = Fleet(self._options, selector, self._read)
            try:
                self._fleet.start_server()
                while not self._is_closing:
                    self._fleet.replenish()
                    self._dispatch()
                    # Wait until the next deadline of a job or of a worker's start.
                    expires = [w.expires for w in self._fleet.workers if w.job is not None or w.pidfd is None]
                    wait_s = max(0.0, min(expires) - awake_s()) if expires else None
                    # Messages that have arrived are read before deadlines are checked.
                    for key, events in selector.select(wait_s):
                        key.data(events)
                    self._expire()
                error = RuntimeError("the verifier pool was closed before the job was judged")
            # There may be no memory, processes or file descriptors left, or no worker that starts.
            except (WorkerError, OSError) as caught:
                error = caught
            finally:
                jobs = [worker.job for worker in self._fleet.workers if worker.job is not None]
                self._fleet.close()
                with self._lock:
                    self._ended = error
                    jobs += self._waiting
                    self._waiting.clear()
                os.close(self._wake)
                # Callers that wait for results receive the error.
                for job in jobs:
                    with suppress(InvalidStateError):
                        job.future.set_exception(error)

    def _dispatch(self) -> None:
        """Give waiting jobs to idle workers, one each, so that at most `num_workers` workers execute jobs."""
        num_busy = sum(worker.job is not None for worker in self._fleet.workers)
        idle = [worker for worker in self._fleet.workers if worker.pidfd is not None and worker.job is None]
        # Prefer workers that have imported more scorers, whose imports and caches can be reused.
        idle.sort(key=lambda worker: -len(worker.functions))
        for worker in idle[: max(0, self._options.num_workers - num_busy)]:
            while self._waiting and worker.job is None:
                job = self._waiting.popleft()
                # This is False if the caller has cancelled the job.
                if job.future.set_running_or_notify_cancel():
                    limit_s = job.deadline_s
                    if job.function not in worker.functions:
                        limit_s = self._options.start_limit_s
                    worker.job, worker.since = job, awake_s()
                    worker.expires = worker.since + limit_s
                    worker.channel.send(job.message)
                    self._fleet.flush(worker)

    def _read(self, worker: Worker) -> None:
        """Process a worker's messages; the end of its stream means that the worker has ended."""
        try:
            for message in worker.channel.receive():
                # Messages after a worker's last reply are ignored.
                if worker not in self._fleet.workers:
                    break
                is_start = message == STARTED
                # A scorer is imported once; its execution does not begin again.
                if worker.job is None or (is_start and worker.job.function in worker.functions):
                    raise ValueError("the worker process spoke out of turn")
                if is_start:
                    worker.functions.add(worker.job.function)
                    worker.since = awake_s()
                    worker.expires = worker.since + worker.job.deadline_s
                    continue
                reply = WorkerReply.decode(message)
                if reply.error:
                    job, worker.job = worker.job, None
                    with suppress(InvalidStateError):
                        job.future.set_exception(ERRORS[reply.error](reply.reason))
                    continue
                seconds = awake_s() - worker.since
                result = JobResult(
                    reward=reply.reward,
                    outcome=reply.outcome,
                    seconds=seconds,
                    reason=reply.reason,
                    verdicts=reply.verdicts,
                )
                # An interruption can leave a library's globals inconsistent, and later jobs might be judged wrongly.
                is_sound = reply.outcome not in ("timed_out", "crashed") and not reply.is_last
                self._finish(worker, result, keep=is_sound and reply.resident_mib <= self._options.recycle_mib)
        except (EOFError, ValueError) as error:
            seconds = awake_s() - worker.since
            self._finish(worker, JobResult(reward=None, outcome="crashed", seconds=seconds, reason=str(error)))

    def _expire(self) -> None:
        """Kill the workers whose start or whose job has exceeded its deadline."""
        now = awake_s()
        for worker in [w for w in self._fleet.workers if w.pidfd is None and w.expires <= now]:
            self._fleet.give_up(worker)
        for worker in [w for w in self._fleet.workers if w.job is not None and w.expires <= now]:
            # This thread may have been delayed; a reply that has arrived counts.
            self._read(worker)
            if worker.job is not None and worker.expires <= now:
                reason = f"killed after {now - worker.since:.1f} s"
                seconds = awake_s() - worker.since
                self._finish(worker, JobResult(reward=None, outcome="timed_out", seconds=seconds, reason=reason))

    def _finish(self, worker: Worker, result: JobResult, *, keep: bool = False) -> None:
        """Set the result of a worker's job, if it has one. Replace the worker unless `keep` is set."""
        job, worker.job = worker.job, None
        counts = self.statistics
        if not keep:
            self._fleet.discard(worker)
            counts = replace(counts, replaced=counts.replaced + 1)
        if job is not None:
            name: str = result.outcome
            if result.outcome == "scored":
                name = "correct" if result.reward is not None and result.reward.correct else "wrong"
            counts = replace(
                counts,
                **{name: getattr(counts, name) + 1},
                jobs=counts.jobs + 1,
                shortened=counts.shortened + job.shortened,
                seconds=counts.seconds + result.seconds,
                max_seconds=max(counts.max_seconds, result.seconds),
            )
        self.statistics = counts
        if job is not None:
            with suppress(InvalidStateError):
                job.future.set_result(result)


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
