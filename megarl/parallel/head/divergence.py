"""Name the divergences between a student's and a teacher's distribution over the vocabulary.

This module does not import torch. For student logits z and teacher logits u after temperature, p = softmax z and q =
softmax u, per token:

divergence   value                                                  gradient by z_v
reverse      KL(p‖q) = Σ p (log p − log q)                          p_v (log p_v − log q_v − KL)
forward      KL(q‖p) = Σ q (log q − log p)                          p_v − q_v
jsd          (1−β) KL(p‖m) + β KL(q‖m),  m = (1−β) p + β q          (1−β) p_v (log p_v − log m_v − KL(p‖m))

Each gradient sums to 0 over the vocabulary. All three are 0 where p = q, and only there.
"""

from enum import StrEnum


class Divergence(StrEnum):
    """The divergence of a student from its teacher: reverse KL, forward KL, or Jensen-Shannon with a weight β."""

    REVERSE = "reverse"
    FORWARD = "forward"
    JSD = "jsd"
