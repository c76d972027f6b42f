"""Search the first tensor on which engine and trainer differ, and describe the difference in words."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megarl.bisect.causes import find_cause
from megarl.bisect.departure import Departure, Explanation, distance
from megarl.bisect.rules import LayerRules, Weights
from megarl.types.passes import PassPlace, RecordedPass, places

# How far a tensor may be from what follows from those before it, as a share of its largest element.
BOUNDS = {"float32": 2e-5, "bfloat16": 2e-2, "float8": 0.15}
# The same between the two sides, whose errors add up over layers.
_BETWEEN = 30
ENGINE, TRAINER = "engine", "trainer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Discrepancy:
    """The first difference. side: who departs from the model's files; None if that is not known."""

    place: PassPlace
    size: float
    side: str | None
    cause: Explanation | None = None

    @property
    def lines(self) -> tuple[str, ...]:
        """Return the finding in words."""
        if self.side is None:
            return (
                f"{self.place}: engine and trainer differ by {self.size:.1e} of the largest element",
                "cause: none is known, since no rule says what this tensor should be",
            )
        where = f"{self.place}: the {self.side} departs by {self.size:.1e} of the largest element"
        if self.cause is None:
            return where, "cause: none of those that are known explains it"
        return where, f"cause: {self.cause.name}: {self.side}: {self.cause.words}"


def search(
    weights: Weights,
    recorded: Mapping[str, RecordedPass],
    *,
    dtypes: Mapping[str, str],
    older: Sequence[Weights] = (),
) -> Discrepancy | None:
    """Return the first difference, or None. recorded, dtypes: by side. older: earlier versions of the weights."""
    bounds = {side: BOUNDS[dtypes[side]] for side in recorded}
    for place in places(weights.spec.dims.num_layers):
        for side in (each for each in (TRAINER, ENGINE) if place in recorded[each].values):
            rules = LayerRules(weights=weights, recorded=recorded[side])
            if (operation := rules.operation(place)) is None:
                continue
            value = recorded[side].values[place]
            if (size := distance(operation.compute(), value)) <= bounds[side]:
                continue
            earlier = [LayerRules(weights=each, recorded=recorded[side]) for each in older]
            departure = Departure(
                place=place, operation=operation, recorded=value, rules=rules, older=earlier, bound=bounds[side]
            )
            return Discrepancy(place=place, size=size, side=side, cause=find_cause(departure))
        engine, trainer = (recorded[side].values.get(place) for side in (ENGINE, TRAINER))
        same_terms = recorded[ENGINE].temperature == recorded[TRAINER].temperature
        if engine is not None and trainer is not None and same_terms:
            size = distance(trainer, engine)
            if size > _BETWEEN * max(bounds.values()):
                return Discrepancy(place=place, size=size, side=None)
    return None
