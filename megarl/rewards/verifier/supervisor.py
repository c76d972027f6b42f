"""The thread of a pool: it hands jobs to workers, one each, and kills what is over its deadline."""

import os
import selectors
import threading
import time
from collections import deque
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace

from megarl.errors import WorkerError
from megarl.rewards.verifier.fleet import Fleet, Task, Worker
from megarl.rewards.verifier.replies import ERRORS, Reply
from megarl.rewards.verifier.types import Verdict, VerifierOptions, VerifierStatistics
from megarl.rewards.verifier.worker import STARTED


class Supervisor:
    """Its methods may be called from any thread and do not wait, `stop` excepted."""

    def __init__(self, options: VerifierOptions) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._waiting: deque[Task] = deque()
        self._is_closing = False
        self._ended: Exception | None = None
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Replaced as a whole by the supervisor's thread, so that readers need no lock.
        self.statistics = VerifierStatistics()
        # Workers are its children and die with it, so it does all that concerns them.
        self._thread = threading.Thread(target=self._run, name="verifier-pool", daemon=True)
        self._thread.start()

    def submit(self, task: Task) -> None:
        with self._lock:
            if self._is_closing or self._ended:
                raise RuntimeError("the verifier pool is closed; make another one") from self._ended
            self._waiting.append(task)
            os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """Ends all workers; what was not judged by now gets a RuntimeError. Returns when they are gone."""
        with self._lock:
            if not self._is_closing and not self._ended:
                self._is_closing = True
                os.eventfd_write(self._wake, 1)
        # The last one to refer to a pool may be a callback in its thread.
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        error: Exception = RuntimeError("the verifier pool's thread ended by an error; see standard error")
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ, lambda _: os.eventfd_read(self._wake))
            self._fleet = Fleet(self._options, selector, self._read)
            try:
                self._fleet.start()
                while not self._is_closing:
                    self._dispatch()
                    # What has arrived is read before anything is found to be late.
                    for key, events in selector.select(self._wait_s()):
                        key.data(events)
                    self._expire()
                    self._fleet.replenish()
                error = RuntimeError("the verifier pool was closed before the job was judged")
            # No memory, processes or file descriptors left, or nothing that starts.
            except (WorkerError, OSError) as caught:
                error = caught
            finally:
                self._leave(error)

    def _leave(self, error: Exception) -> None:
        """Those who wait for verdicts learn of it."""
        tasks = [worker.task for worker in self._fleet.workers if worker.task is not None]
        self._fleet.close()
        with self._lock:
            self._ended = error
            tasks += self._waiting
            self._waiting.clear()
        os.close(self._wake)
        for task in tasks:
            _fail(task.future, error)

    def _busy(self) -> list[Worker]:
        return [worker for worker in self._fleet.workers if worker.task is not None]

    def _wait_s(self) -> float | None:
        """Until the next deadline of a job or of a start."""
        expires = [w.expires for w in self._fleet.workers if w.task is not None or w.pidfd is None]
        return max(0.0, min(expires) - time.monotonic()) if expires else None

    def _dispatch(self) -> None:
        """To every free worker one job. Spares are started already, but do not add to how many execute."""
        idle = [w for w in self._fleet.workers if w.pidfd is not None and w.task is None]
        # What a worker has imported, and what scorers cache there, is of use again.
        idle.sort(key=lambda worker: -len(worker.functions))
        for worker in idle[: max(0, self._options.num_workers - len(self._busy()))]:
            while self._waiting and worker.task is None:
                task = self._waiting.popleft()
                # False if the caller has cancelled it.
                if task.future.set_running_or_notify_cancel():
                    self._start(worker, task)

    def _start(self, worker: Worker, task: Task) -> None:
        is_imported = task.function in worker.functions
        worker.task, worker.since = task, time.monotonic()
        worker.expires = worker.since + (self._options.deadline_s if is_imported else self._options.start_limit_s)
        self._fleet.send(worker, task.message)

    def _read(self, worker: Worker) -> None:
        """Takes what a worker has said; if that is nothing any more, the worker has ended."""
        try:
            for message in worker.channel.receive():
                # After its last verdict a worker has nothing to say.
                if worker in self._fleet.workers:
                    self._handle(worker, message)
        except (EOFError, ValueError) as error:
            self._end(worker, Verdict(reward=None, outcome="crashed", seconds=_since(worker), reason=str(error)))

    def _handle(self, worker: Worker, message: bytes) -> None:
        is_start = message == STARTED
        # A scorer is imported once; its execution does not begin again.
        if worker.task is None or (is_start and worker.task.function in worker.functions):
            raise ValueError("the worker process spoke out of turn")
        if is_start:
            worker.functions.add(worker.task.function)
            worker.since = time.monotonic()
            worker.expires = worker.since + self._options.deadline_s
        else:
            self._conclude(worker, Reply.decode(message))

    def _conclude(self, worker: Worker, reply: Reply) -> None:
        assert worker.task is not None
        if reply.error:
            _fail(worker.task.future, ERRORS[reply.error](reply.reason))
            worker.task = None
            return
        verdict = Verdict(reward=reply.reward, outcome=reply.outcome, seconds=_since(worker), reason=reply.reason)
        # An interruption can leave a library's globals half set, and what it judged next might be judged wrongly.
        if reply.outcome in ("timed_out", "crashed") or reply.resident_mib > self._options.recycle_mib:
            self._end(worker, verdict)
        else:
            self._report(worker, verdict)

    def _expire(self) -> None:
        now = time.monotonic()
        for worker in [w for w in self._fleet.workers if w.pidfd is None and w.expires <= now]:
            self._fleet.give_up(worker)
        for worker in [w for w in self._busy() if w.expires <= now]:
            # This thread may have been kept from running; a verdict that is there counts.
            self._read(worker)
            if worker.task is not None and worker.expires <= now:
                reason = f"killed after {now - worker.since:.1f} s"
                verdict = Verdict(reward=None, outcome="timed_out", seconds=_since(worker), reason=reason)
                self._end(worker, verdict)

    def _end(self, worker: Worker, verdict: Verdict) -> None:
        """The verdict on a worker's last job, if it had one; another worker will take its place."""
        self._fleet.discard(worker)
        self.statistics = replace(self.statistics, replaced=self.statistics.replaced + 1)
        if worker.task is not None:
            self._report(worker, verdict)

    def _report(self, worker: Worker, verdict: Verdict) -> None:
        task, worker.task = worker.task, None
        assert task is not None
        self.statistics = counted(self.statistics, verdict, task.shortened)
        with suppress(InvalidStateError):
            task.future.set_result(verdict)


def counted(statistics: VerifierStatistics, verdict: Verdict, shortened: bool) -> VerifierStatistics:
    """`statistics` with one more verdict."""
    name: str = verdict.outcome
    if verdict.outcome == "scored":
        assert verdict.reward is not None
        name = "correct" if verdict.reward.correct else "wrong"
    return replace(
        statistics,
        **{name: getattr(statistics, name) + 1},
        shortened=statistics.shortened + shortened,
        seconds=statistics.seconds + verdict.seconds,
        max_seconds=max(statistics.max_seconds, verdict.seconds),
    )


def _since(worker: Worker) -> float:
    return time.monotonic() - worker.since


def _fail(future: Future[Verdict], error: Exception) -> None:
    with suppress(InvalidStateError):
        future.set_exception(error)
