"""Shape advantages with CPO: change them by how much a hint in the prompt changes the log-probs of the response."""

from megarl.algos.cpo.formulas import Terms, apply_formula, make_terms
from megarl.algos.cpo.information import MI_ESTIMATORS
from megarl.algos.cpo.inputs import CpoInputs
from megarl.algos.cpo.methods import coefficients, formula, neg_scope
from megarl.config.algo import CpoConfig
from megarl.config.torch_later import Tensor, torch
from megarl.types import TokenQuantity


def shape_advantages(x: CpoInputs, cfg: CpoConfig) -> Tensor:
    """Return the advantages [B, T] as changed by the configured CPO method, 0 outside the loss mask.

    docs/algorithms.md gives the formulas. Rows are independent of each other. Raises NonFiniteError if the method reads
    NaN or infinity.

    >>> cfg = CpoConfig(method="verifier_sign", weight_clip=0.25)
    >>> shape_advantages(terms([[1.0, -1.0]]).inputs, cfg).tolist()
    [[1.25, 0.75]]
    """
    if not x.loss_mask.numel():
        return torch.zeros_like(x.advantages)
    return apply_formula(formula(cfg), terms_of(x, cfg))


def terms_of(x: CpoInputs, cfg: CpoConfig) -> Terms:
    """Return the `Terms` (all tensors that CPO formulas read) for the configured method, 0 on tokens that it must not
    change.

    >>> terms_of(terms([[1.0, -1.0]]).inputs, CpoConfig(method="mi")).delta.tolist()
    [[1.0, -1.0]]
    """
    chosen = formula(cfg)
    return make_terms(
        x,
        cfg,
        neg_scope=neg_scope(cfg),
        uses_hint=chosen.uses_hint,
        uses_entropy="entropy" in chosen.reads,
        coefficients=coefficients(cfg),
    )


def required_quantities(cfg: CpoConfig) -> frozenset[TokenQuantity]:
    """Return the quantities that the method reads. The trainer must compute all of them, even the old log-probs.

    >>> ", ".join(sorted(required_quantities(CpoConfig(method="mi", formula_set="doc"))))
    'hint_logprobs, old_logprobs'
    """
    chosen = formula(cfg)
    quantities = set()
    if chosen.uses_hint:
        quantities |= {TokenQuantity.OLD_LOGPROBS, TokenQuantity.HINT_LOGPROBS}
        if cfg.shuffled_baseline:
            quantities.add(TokenQuantity.SHUFFLED_HINT_LOGPROBS)
        if "mi" in chosen.reads and MI_ESTIMATORS.get(cfg.mi_estimator).uses_hint_kl:
            quantities.add(TokenQuantity.HINT_KL)
    if "entropy" in chosen.reads and cfg.entropy_source == "old":
        quantities.add(TokenQuantity.OLD_ENTROPY)
    return frozenset(quantities)


def shapes_in_loss(cfg: CpoConfig) -> bool:
    """Return whether CPO reads the current entropy and therefore shapes in the loss per micro-batch, not on the host.

    >>> shapes_in_loss(CpoConfig(method="mi3", entropy_source="current"))
    True
    """
    return "entropy" in formula(cfg).reads and cfg.entropy_source == "current"
