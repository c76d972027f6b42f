"""Watch the first updates of a role, so that none which moves no weight is taken for learning."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megarl.errors import RunError
from megarl.types import Row
from megarl.types.messages import Role, UpdateResult

# So many updates that should have moved weights, and did not, are no accident.
MOST_IDLE = 3
# An optimizer step that changes a smaller share of the weights is lost in their rounding.
FEWEST_MOVED = 0.01


@dataclass(slots=True)
class WeightWatch:
    """Whether the updates of a trained role have moved its weights; nothing is looked at once one has.

    idle: the updates so far that had a reason to, and did not.
    """

    role: Role
    is_done: bool = False
    idle: list[str] = field(default_factory=list)

    def look(self, rows: Sequence[Row], result: UpdateResult, *, step: int, is_last: bool, warms_up: bool) -> None:
        """Look at an update. Raises RunError if no row has a loss token, or if the first updates have moved nothing.

        is_last: whether no update follows. warms_up: whether the learning rate still grows.
        """
        if self.is_done:
            return
        if not any(row.num_loss_tokens for row in rows):
            raise RunError(
                f"step {step}: none of the {len(rows)} rows of the {self.role} has a loss token, so there is nothing "
                "to train on; check loss masks and limits of the data"
            )
        given = [row.quantities["advantages"] for row in rows if "advantages" in row.quantities]
        has_advantage = any(np.any(values[row.loss_mask]) for values, row in zip(given, rows, strict=False))
        if given and self.role is Role.ACTOR and not has_advantage and not result.metrics.get("distill/loss"):
            return
        moved = result.num_moved / result.num_watched if result.num_watched else 1.0
        if result.metrics.get(f"{self.role}/grad_norm") == 0:
            self.idle.append(
                "its gradient is 0, so no loss token has a path to a trained parameter: check the loss (does it use "
                "logprobs, without detach?), weights per token, and frozen parameters"
            )
        elif moved < FEWEST_MOVED:
            if warms_up:
                return
            self.idle.append(
                f"lr={result.metrics[f'{self.role}/lr']:g} changed {moved:.2%} of its weights, and rounding lost the "
                f"rest: raise {'critic' if self.role is Role.CRITIC else 'actor'}.optimizer.lr"
            )
        else:
            self.is_done = True
        if self.idle and (is_last or len(self.idle) == MOST_IDLE):
            raise RunError(
                f"step {step}: {len(self.idle)} updates of the {self.role} had something to learn and moved nothing; "
                f"{self.idle[-1]}"
            )
