"""Make every update find samples under way, on any machine: an engine begins new requests, then waits for its update.

`hold_engines` patches an engine's process. It is for drivers that submit new requests just before an update.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megarl.rollout.stepping import Stepper

# Requests of before the update with this index (the first weights have index 0) are not waited for.
FIRST_UPDATE = 2
NUM_BEGUN = 2


def hold_engines() -> None:
    """Let an update begin only when `NUM_BEGUN` of the latest new requests have tokens; no step is taken in between.

    Fewer are enough if fewer of them are left unfinished. Continued requests are not waited for.
    """
    add, held, step = Stepper.add, Stepper.held, Stepper._step_for
    # Latest new requests, and whether enough of them have begun.
    latest: set[int] = set()
    num_updates, is_waiting = 0, False

    def add_and_wait(stepper: Stepper, ids: Sequence[int], prompts: Sequence[Any], params: Sequence[Any]) -> None:
        add(stepper, ids, prompts, params)
        new = {key for key, each in zip(ids, params, strict=True) if not each.extra_args["megarl_num_before"]}
        if num_updates >= FIRST_UPDATE and new:
            assert not is_waiting, f"new requests {sorted(new)} for an engine that takes no step until its update"
            latest.clear()
            latest.update(new)

    def step_or_wait(stepper: Stepper, wanted: dict[str, int]) -> dict[int, Any]:
        nonlocal is_waiting
        # The caller holds the lock, which waiting lets go.
        stepper._turn.wait_for(lambda: not is_waiting and stepper._holders == 0)
        outputs = step(stepper, wanted)
        if latest:
            unfinished = {key: len(each.outputs[0].token_ids) for key, each in stepper.unfinished().items()}
            left = latest & unfinished.keys()
            if sum(unfinished[key] > 0 for key in left) >= min(NUM_BEGUN, len(left)):
                latest.clear()
                is_waiting = True
        return outputs

    @contextmanager
    def held_with_samples(stepper: Stepper) -> Iterator[bool]:
        nonlocal num_updates, is_waiting
        with stepper._turn:
            stepper._turn.wait_for(lambda: not latest)
        with held(stepper) as busy:
            yield busy
            num_updates += 1
            is_waiting = False

    Stepper.add, Stepper.held, Stepper._step_for = add_and_wait, held_with_samples, step_or_wait  # type: ignore[method-assign, assignment]
