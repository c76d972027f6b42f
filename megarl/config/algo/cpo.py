"""Define the sections of CPO, which shapes advantages by how much a hint in the prompt changes the log-probs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from megarl.config.setting import ANY_NUMBER, AT_LEAST_0, AT_LEAST_1, FRACTION, PROBABILITY, Range, section, setting
from megarl.errors import ConfigError

# Place → the template of hints that have no other.
_TEMPLATES = {
    "before_question": "{hint}\n\n",
    "after_question": "\n\n{hint}",
    "system": "\n\n{hint}",
    "user_turn": "{hint}\n\n{question}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HintConfig:
    """Configure CPO's hint: a text, such as the solution, that is added to the prompt for one more forward pass."""

    # solution: the hint is extra_info.gold_solution (or solution); answer: it is the ground-truth answer;
    # demonstration: it is the text of the column data.target_key, a whole response.
    source: Literal["solution", "answer", "demonstration"] = "solution"
    # Field of extra_info, or else column, whose text is the hint, such as answer in verl's GSM8K files; null: by
    # source.
    field: str | None = None
    # Where the hint is written. before_question, after_question: in the last user turn, directly before or after its
    # text; system: at the end of the system turn, or in one of its own; user_turn: the template is the whole of the
    # last user turn, with {question} in it.
    place: Literal["before_question", "after_question", "system", "user_turn"] = "before_question"
    # Text to write, with the blanks and line feeds that separate it; the hint replaces {hint} in it. null: the hint,
    # and a blank line between it and the other text.
    template: str | None = None
    # Maximum length of the hint; a longer one is cut at its end. It is also cut where prompt, hint and the longest
    # response would not fit into a micro-batch or the model's context.
    max_tokens: int = setting(2048, AT_LEAST_1)
    # Prompt without a hint. error: the run does not start; skip_row: its rows keep their advantage.
    on_missing: Literal["error", "skip_row"] = "skip_row"

    @property
    def text(self) -> str:
        """Return the template, or that of the place if none is set."""
        return _TEMPLATES[self.place] if self.template is None else self.template

    def check(self, key: str) -> None:
        """Raise ConfigError if the template does not fit its place in the prompt, or if hints have two sources."""
        blanks = {"{hint}", "{question}"}
        expected = blanks if self.place == "user_turn" else {"{hint}"}
        text = self.text
        if {blank for blank in blanks if blank in text} != expected or text.count("{hint}") != 1:
            raise ConfigError(
                f"{key}.template: got {self.template!r} for {key}.place={self.place}, expected text with {{hint}} in "
                f"it once and {{question}} {'also' if self.place == 'user_turn' else 'not at all'}; these places are "
                "filled in"
            )
        if self.field is not None and self.source != "solution":
            raise ConfigError(
                f"{key}.source: got {self.source!r} with {key}.field={self.field}, which decides alone; remove one of "
                "them"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CpoConfig:
    """Shape advantages by the mutual information of hint and response, with a formula from docs/algorithms.md."""

    method: str = "none"  # Name of the method, with or without the suffix _qwen3; none: advantages are not shaped.
    # doc: the formulas as the method was described; ref: as its public code computes them; fix: corrected; null:
    # the method's default.
    formula_set: Literal["doc", "ref", "fix"] | None = None
    ratio_clamp: float = setting(5.0, Range(expected="> 1", above=1))  # λ: likelihood ratios are clamped to [1/λ, λ].
    pos_alpha: float = setting(0.05, AT_LEAST_0)  # Weight of the terms on correct rows.
    neg_alpha: float = setting(0.1, AT_LEAST_0)  # Weight of the terms on negative rows.
    # Weight of the mutual-information term in formulas that do not distinguish correct from negative rows.
    mi_alpha: float = setting(0.1, AT_LEAST_0)
    kl_alpha: float = setting(0.1, AT_LEAST_0)  # Weight of the sequence-level terms.
    # Estimator of the mutual information; see docs/algorithms.md.
    mi_estimator: Literal["p_weighted", "pmi", "kl_is", "full_kl"] = "p_weighted"
    # Which rows count as negative; null: the formula set's default.
    neg_scope: Literal["not_all_correct", "all_wrong_group", "negative_sample"] | None = None
    # How a group's difficulty is judged: by its number of correct samples, or by the variance of its rewards; see
    # docs/algorithms.md.
    difficulty: Literal["three_way", "five_way", "variance", "variance_signed", "data"] = "three_way"
    # With difficulty=data: the field of extra_info, or else the column, that holds it, a number of which the sign
    # counts (−1: hard, 0: medium, 1: easy).
    difficulty_field: str | None = None
    # old: take entropies from the forward pass before the update; current: take them from the update's own
    # forward pass.
    entropy_source: Literal["old", "current"] = "old"
    shuffled_baseline: bool = False  # Subtract the effect of another prompt's hint.
    exclude_answer: bool = False  # Do not shape the advantages of the final answer's tokens (boxed, or after ####).
    # verifier_sign: the hint's weights are clipped to 1 ± this, then divided by their mean over the row; the
    # division may take them outside that range.
    weight_clip: float = setting(0.2, PROBABILITY)
    # verifier_sign: share of the hint's weights in the advantage at the first step.
    mix: float = setting(1.0, FRACTION)
    # verifier_sign: steps over which that share decays to 0; 0: it stays constant.
    mix_decay_steps: int = setting(0, AT_LEAST_0)
    # Coefficients that the method itself declares, by name; see "Adding a method" in docs/algorithms/cpo.md.
    coefficients: Mapping[str, float] = section(dict, ANY_NUMBER)
    hint: HintConfig = field(default_factory=HintConfig)
