"""Watch the first updates of a role for those that move no weight, which would pass for learning."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from megarl.errors import RunError
from megarl.types import Row
from megarl.types.messages import Role, UpdateResult

# This many updates that should have moved weights, and did not, are no accident.
MOST_IDLE = 3
# An optimizer step that changes a smaller share of the weights is lost in their rounding.
FEWEST_MOVED = 0.01
# A teacher that is nearer to the policy, in nats per token, tells it nothing, and an optimizer that divides by the size
# of gradients makes steps of rounding. With ε, the spacing of a type's numbers at 1, rounded logits differ by ε and
# more, and distributions by its square. Log-probs of -8 to -16 have a spacing of 8 ε in float32.
LEAST_DIVERGENCE = {"float32": 8 * 2.0**-23, "bfloat16": 2.0**-14}
MOST_UNTAUGHT = 2


def tells_something(metrics: Mapping[str, float], dtype: str) -> bool:
    """Return whether there is a teacher whose distribution is not that of the policy, a model of type `dtype`."""
    found = [metrics.get(f"distill/{name}", 0.0) for name in ("reverse_kl", "forward_kl")]
    return max(map(abs, found)) >= LEAST_DIVERGENCE[dtype]


@dataclass(slots=True)
class WeightWatch:
    """Whether the updates of a trained role have moved its weights; nothing is looked at once one has.

    is_taught: whether the role learns from a teacher's distribution alone. idle: the updates so far that had a reason
    to move weights, and did not, or that were told nothing.
    """

    role: Role
    is_taught: bool = False
    dtype: str = "float32"
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
        if self.is_taught and not tells_something(result.metrics, self.dtype):
            self.idle.append("")
            if is_last or len(self.idle) == MOST_UNTAUGHT:
                raise RunError(
                    f"step {step}: the teacher gives all tokens of {len(self.idle)} updates the probabilities that the "
                    "policy gives them, and nothing else teaches it; name another teacher (teacher.model_path), or "
                    "another policy (model.path)"
                )
            return
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
            return
        if is_last or len(self.idle) == MOST_IDLE:
            raise RunError(
                f"step {step}: {len(self.idle)} updates of the {self.role} had something to learn and moved nothing; "
                f"{self.idle[-1]}"
            )
