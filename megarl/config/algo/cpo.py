"""CPO: the advantage shaped by what a hint changes in the policy's log-probs."""

from dataclasses import dataclass, field
from typing import Literal

from megarl.config.setting import AT_LEAST_0, AT_LEAST_1, FRACTION, PROBABILITY, Range, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class HintConfig:
    """The hint that is put after the last user tag of a prompt for one more scoring pass."""

    source: Literal["solution", "answer"] = "solution"  # extra_info.gold_solution, or the ground truth.
    template: str = "{hint}"  # Text around the hint.
    max_tokens: int = setting(2048, AT_LEAST_1)  # Longer hints are cut at their end.
    on_missing: Literal["error", "skip_row"] = "skip_row"  # A row without a hint: an error, or no adjustment.


@dataclass(frozen=True, slots=True, kw_only=True)
class CpoConfig:
    """Mutual-information shaping: method and formula set choose a formula of docs/algorithms.md."""

    method: str = "none"  # A wrapper's name, with or without _qwen3; none: advantages stay.
    # doc: as the method was described; ref: as its public code computes; fix: corrected; null: what the method has.
    formula_set: Literal["doc", "ref", "fix"] | None = None
    ratio_clamp: float = setting(5.0, Range(expected="> 1", above=1))  # λ: likelihood ratios are clamped to [1/λ, λ].
    pos_alpha: float = setting(0.05, AT_LEAST_0)  # Weight on correct rows.
    neg_alpha: float = setting(0.1, AT_LEAST_0)  # Weight on the others.
    mi_alpha: float = setting(0.1, AT_LEAST_0)  # Weight of the mutual information where it is not told apart.
    kl_alpha: float = setting(0.1, AT_LEAST_0)  # Weight of sequence-level terms.
    mi_estimator: Literal["p_weighted", "pmi", "kl_is", "full_kl"] = "p_weighted"  # See docs/algorithms.md.
    # Who counts as negative; null: as the formula set says.
    neg_scope: Literal["not_all_correct", "all_wrong_group", "negative_sample"] | None = None
    # How a group's difficulty is judged: by correct samples, or by the variance of rewards; see docs/algorithms.md.
    difficulty: Literal["three_way", "five_way", "variance", "variance_signed"] = "three_way"
    # Entropies of the scoring pass before the update, or of the update's own forward pass.
    entropy_source: Literal["old", "current"] = "old"
    shuffled_baseline: bool = False  # Subtract what another prompt's hint changes.
    exclude_answer: bool = False  # Tokens of the final answer (boxed, or after ####) keep their advantage.
    # verifier_sign: the hint's weights are clipped to 1 ± this, then divided by their mean over the row, which may take
    # them beyond.
    weight_clip: float = setting(0.2, PROBABILITY)
    # verifier_sign: share of the hint's weights in the advantage, at the first step.
    mix: float = setting(1.0, FRACTION)
    mix_decay_steps: int = setting(0, AT_LEAST_0)  # verifier_sign: steps over which that share falls to 0; 0: it stays.
    hint: HintConfig = field(default_factory=HintConfig)
