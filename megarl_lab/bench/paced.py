"""Pace the trainer and the engines of a run, as if each had a device of its own however busy the CPU cores are.

A decode step, an update and a forward pass take at least the time of `PACE`: what is left of it after the real work is
slept. On shared cores trainer and engines slow each other; with a pace above what the work takes there, they do not.
`pace_driver` patches a process that is about to call `ray.init`, and through it the engines of that run.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Least times in seconds: a decode step of b sequences takes decode_step_s + b · decode_sequence_s; every token
    costs train_token_s in an update, and forward_token_s in a forward pass and where an engine computes it again.
    """

    decode_step_s: float
    decode_sequence_s: float
    train_token_s: float
    forward_token_s: float


PACE = Pace(decode_step_s=0.040, decode_sequence_s=0.0005, train_token_s=0.0021, forward_token_s=0.0007)


def pace_engines() -> None:
    """Pace the engine that this process may become: a step is counted only after the time that it has to take.

    While steps follow one another, one that took too long is made up for by the next ones. The first step after an
    update also pays for the tokens whose keys and values the update dropped.
    """
    from megarl.rollout.stepping import MAX_PAUSE_S, EngineWork, Stepper

    counted, held = EngineWork.add_step, Stepper.held
    owed, due, ended = 0, 0.0, 0.0

    @contextmanager
    def held_for_update(stepper: Stepper) -> Iterator[bool]:
        nonlocal owed
        before = stepper.work.recomputed_tokens
        with held(stepper) as busy:
            yield busy
            owed += stepper.work.recomputed_tokens - before

    def add_step(work: EngineWork, start: float, end: float, num_sequences: int) -> None:
        nonlocal owed, due, ended
        length = PACE.decode_step_s + num_sequences * PACE.decode_sequence_s + owed * PACE.forward_token_s
        due = (due if start - ended < MAX_PAUSE_S else start) + length
        owed = 0
        time.sleep(max(0.0, due - end))
        ended = time.time()
        counted(work, start, ended, num_sequences)

    Stepper.held = held_for_update  # type: ignore[method-assign, assignment]
    EngineWork.add_step = add_step  # type: ignore[method-assign, assignment]


def pace_driver() -> None:
    """Pace the passes that this process asks ranks for, and the engines of the Ray that it is about to start."""
    from megarl.cluster.workers import RoleWorkers

    def paced(call: Callable[..., Any], token_s: float) -> Callable[..., Any]:
        def slow(self: RoleWorkers, rows: Any, *given: Any) -> Any:
            end = time.monotonic() + token_s * sum(row.num_tokens for row in rows)
            result = call(self, rows, *given)
            time.sleep(max(0.0, end - time.monotonic()))
            return result

        return slow

    RoleWorkers.update = paced(RoleWorkers.update, PACE.train_token_s)  # type: ignore[method-assign]
    RoleWorkers.forward = paced(RoleWorkers.forward, PACE.forward_token_s)  # type: ignore[method-assign]
    set_up_workers(f"{__name__}.pace_engines")


def set_up_workers(hook: str) -> None:
    """Make each worker of the Ray that this process is about to start call a function, named by module and name."""
    import ray

    init = ray.init

    def hooked(*, runtime_env: dict[str, Any], **given: Any) -> Any:
        return init(runtime_env=runtime_env | {"worker_process_setup_hook": hook}, **given)

    ray.init = hooked
