"""Shape advantages with CPO: change them by how much a hint in the prompt changes the log-probs of the response.

`shape_advantages` runs on the host over a whole step, or in the loss if it needs current entropies (`shapes_in_loss`).
"""

from megarl.algos.cpo.difficulty import difficulty_metrics, group_difficulty
from megarl.algos.cpo.inputs import (
    DIFFICULTY,
    EXCLUDED,
    LOSS_QUANTITIES,
    CpoInputs,
    inputs_from_batch,
    inputs_from_rows,
    loss_quantities,
)
from megarl.algos.cpo.methods import check_cpo
from megarl.algos.cpo.metrics import cpo_metrics, hint_metrics, shift_diagnostics
from megarl.algos.cpo.shaping import required_quantities, shape_advantages, shapes_in_loss

__all__ = [
    "DIFFICULTY",
    "EXCLUDED",
    "LOSS_QUANTITIES",
    "CpoInputs",
    "check_cpo",
    "cpo_metrics",
    "difficulty_metrics",
    "group_difficulty",
    "hint_metrics",
    "inputs_from_batch",
    "inputs_from_rows",
    "loss_quantities",
    "required_quantities",
    "shape_advantages",
    "shapes_in_loss",
    "shift_diagnostics",
]
