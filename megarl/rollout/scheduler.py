"""Decide which prompts are sampled and which finished groups train next: the schedule of a run, without clock or IO.

A *ticket* is one prompt's turn: tickets are numbered in the order of the prompts, and each has the version of the
weights (the number of updates) at which it was admitted. The *pipeline* holds the tickets that were admitted and
have neither been trained on nor been removed. A step takes P = `prompts_per_step` groups. With staleness η the
pipeline has room for B = (η + 1)·P tickets.

**Bound.** The lag of a token, s − 1 − (version that sampled it) in the step s that trains on it, is at most
η + ⌈(W − 1)/P⌉, with W = `window` and η alone in strict order (W = 1). Proof: a ticket admitted at version v has at
most B − 1 older ones before it. Each of the steps v + 1, v + 2, … takes at least P tickets, the oldest first but for
at most W − 1 younger ones that pass. So it is taken in step s ≤ v + B/P + ⌈(W − 1)/P⌉. Versions only grow while a
sample is written, so no token of it is older than v.

Tickets that a filter removed in step v + 1 before the admission count neither among the older ones nor among those
that the step takes. A step whose refills are used up may end with k < P groups, and so takes only k of the pipeline;
`admissible` is told so by `step_takes`, and leaves P − k places free until the next version.
"""

from collections.abc import Mapping
from typing import Any

from megarl.config.generation import max_lag


class Scheduler:
    """The schedule of a run; `megarl.train.collect` and the simulator of `megarl plan-async` both follow it.

    prompts_per_step: P. staleness: η, the number of updates that may come between a ticket's admission and the start
    of the step that trains on it. window: W, how many tickets, counted from the oldest that no step took, a step may
    choose finished groups from; 1 is strict order.
    """

    def __init__(self, *, prompts_per_step: int, staleness: int = 0, window: int = 1) -> None:
        self.prompts_per_step, self.staleness, self.window = prompts_per_step, staleness, window
        self.capacity = (staleness + 1) * prompts_per_step
        self.next_number = 0
        # By ticket number, in order: the version at which it was admitted.
        self.pipeline: dict[int, int] = {}
        self._done: set[int] = set()
        self._taken: set[int] = set()

    @property
    def max_lag(self) -> int:
        """Return the bound on the lag of any token: η + ⌈(W − 1)/P⌉."""
        return max_lag(self.staleness, self.window, self.prompts_per_step)

    def admissible(self, steps_left: int | None = None, *, step_takes: int | None = None) -> int:
        """Return how many tickets may be admitted now; with `steps_left`, no more than those steps will take.

        step_takes: how many tickets of the pipeline the current step takes for certain, those included that it has
        taken and that are still there; None: P of them, as before a step, and in one that goes on until it has P.
        """
        capacity = self.capacity
        if step_takes is not None:
            capacity -= max(0, self.prompts_per_step - step_takes)
        if steps_left is not None:
            capacity = min(capacity, steps_left * self.prompts_per_step)
        return max(0, capacity - len(self.pipeline))

    def admit(self, version: int) -> int:
        """Admit the next ticket at a version of the weights, and return its number."""
        number = self.next_number
        self.next_number += 1
        self.pipeline[number] = version
        return number

    def done(self, number: int) -> None:
        """Record that all samples of a ticket are finished."""
        self._done.add(number)

    def waiting(self) -> list[int]:
        """List the tickets of the pipeline that no step has taken, oldest first."""
        return [number for number in self.pipeline if number not in self._taken]

    def takeable(self) -> int | None:
        """Return the oldest finished ticket that a step may take now, or None.

        It is among the first `window` tickets that were not taken; with window 1, the oldest or none.
        """
        waiting = self.waiting()
        return next((n for n in waiting if n in self._done and n < waiting[0] + self.window), None)

    def take(self, number: int) -> None:
        """Take a finished ticket into the current step; it keeps its place in the pipeline until `release`."""
        self._taken.add(number)

    def put_back(self) -> None:
        """Give up what the current step took: a signal stops it while it waits for samples."""
        self._taken.clear()

    def remove(self, number: int) -> None:
        """Remove a ticket whose group does not train; its place is free at once."""
        del self.pipeline[number]
        self._done.discard(number)
        self._taken.discard(number)

    def release(self) -> None:
        """Free the places of the tickets that the step took, once engines have the weights that it made."""
        for number in list(self._taken):
            self.remove(number)

    def state_dict(self) -> dict[str, object]:
        """Return the state between two steps for a checkpoint, when no taken ticket is left."""
        return {
            "staleness": self.staleness,
            "window": self.window,
            "next_number": self.next_number,
            "pipeline": [[number, version] for number, version in self.pipeline.items()],
            "done": sorted(self._done),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` of a scheduler with the same settings returned."""
        self.next_number = int(state["next_number"])
        self.pipeline = {int(number): int(version) for number, version in state["pipeline"]}
        self._done, self._taken = {int(number) for number in state["done"]}, set()
