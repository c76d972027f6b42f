"""Find what is wrong with a weight by what was computed with it: stale, misplaced, zero, scaled, or one element."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from megarl.bisect.departure import Departure
from megarl.bisect.operations import Embed, LayerOperation, Linear, LogitsHead, Norm, RoutedMlps
from megarl.types.passes import Probe

STALE, MISPLACED, MISSING = "stale weight", "misplaced weight", "missing weight"
# How many equal parts of a tensor ranks may have.
_PARTS = (2, 4, 8)
_TOGETHER = (Probe.QUERY, Probe.KEY, Probe.VALUE)


def weight_causes(departure: Departure) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with the weight of a departure's operation, in words; nothing if it has none."""
    tensor = departure.rules.weights.name(departure.place)
    others = list(other_weights(departure))
    if isinstance(departure.operation, RoutedMlps):
        return
    if isinstance(departure.operation, LogitsHead):
        yield from _of_head(departure, tensor, others)
        return
    recorded, expected = departure.recorded.flatten(1), departure.operation.compute().flatten(1)
    limit = departure.bound * float(expected.abs().max())
    if isinstance(departure.operation, Embed):
        recorded, expected = recorded.T, expected.T
    wrong = ((recorded - expected).abs().amax(0) > limit).nonzero()[:, 0]
    if not len(wrong):
        return
    what = _span(departure, tensor, wrong)
    mine = recorded[:, wrong]

    def fits(value: torch.Tensor) -> bool:
        return bool((value - mine).abs().max() <= limit)

    for name, words, other in others:
        value = other.compute().flatten(1)
        if fits((value.T if isinstance(departure.operation, Embed) else value)[:, wrong]):
            yield name, f"{what}: {words}"
    if fits(torch.zeros_like(mine)):
        yield MISSING, f"{what}: zero"
    factor = float((mine * expected[:, wrong]).sum() / expected[:, wrong].square().sum())
    if fits(expected[:, wrong] * factor):
        yield "scale", f"{what}: multiplied by {factor:.6g}"
    yield from _moved(departure, what, mine, wrong, limit)
    if isinstance(departure.operation, Linear):
        yield from _of_columns(departure, tensor, departure.operation, others)
    if len(wrong) == 1:
        yield from _one_element(departure, tensor, int(wrong[0]), (recorded - expected)[:, int(wrong[0])])


def other_weights(departure: Departure) -> Iterator[tuple[str, str, LayerOperation]]:
    """Yield the operation with weights of an earlier version, and with those of each other layer."""
    layer, rules, place = departure.place.layer, departure.rules, departure.place
    numbers = [i for i in range(rules.spec.dims.num_layers) if layer not in (None, i)]
    known = [(STALE, f"as in {earlier.spec.path}", earlier) for earlier in departure.older]
    known += [(MISPLACED, f"as in layer {i}", replace(rules, weights=replace(rules.weights, layer=i))) for i in numbers]
    for name, words, elsewhere in known:
        if (other := elsewhere.operation(place)) is None:
            continue
        yield name, words, other
        # The weight alone, with the bias that belongs here.
        if isinstance(other, Linear) and isinstance(departure.operation, Linear) and other.bias is not None:
            yield name, words, replace(other, bias=departure.operation.bias)


def _span(departure: Departure, tensor: str, wrong: torch.Tensor) -> str:
    if isinstance(departure.operation, Embed):
        wrong = departure.operation.ids[wrong]
    return f"{tensor}, rows {int(wrong.min())} to {int(wrong.max())}"


def _moved(
    departure: Departure, what: str, mine: torch.Tensor, wrong: torch.Tensor, limit: float
) -> Iterator[tuple[str, str]]:
    """Yield whether rows of the weight stand in the place of others, perhaps of a tensor beside it."""
    operation = departure.operation
    if isinstance(operation, Embed):
        rows, asked = operation.weight.float() * operation.factor, mine.T
        found = torch.cat([torch.cdist(asked[i : i + 1], rows).argmin(-1) for i in range(len(asked))])
        if (rows[found] - asked).abs().max() <= limit:
            yield MISPLACED, f"{what}: as in rows {int(found.min())} to {int(found.max())}"
        return
    stages = _TOGETHER if departure.place.stage in _TOGETHER else (departure.place.stage,)
    beside = [replace(departure.place, stage=stage) for stage in stages]
    values = [each.compute().flatten(1) for place in beside if (each := departure.rules.operation(place)) is not None]
    value = torch.cat(values, 1)
    nearest = torch.stack([(value - each[:, None]).abs().amax(0).argmin() for each in mine.T])
    if bool((value[:, nearest] - mine).abs().max() <= limit):
        names = " and ".join(dict.fromkeys(map(departure.rules.weights.name, beside)))
        yield MISPLACED, f"{what}: as in rows {int(nearest.min())} to {int(nearest.max())} of {names}"


def _of_columns(
    departure: Departure, tensor: str, operation: Linear, others: list[tuple[str, str, LayerOperation]]
) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with columns of a weight, of which ranks have equal parts."""
    weight = operation.weight.float()
    known = [(name, words, each.weight.float()) for name, words, each in others if isinstance(each, Linear)]
    for parts in _PARTS:
        if weight.shape[1] % parts:
            continue
        size = weight.shape[1] // parts
        blocks = [slice(i * size, (i + 1) * size) for i in range(parts)]
        for i, block in enumerate(blocks):
            what = f"{tensor}, columns {block.start} to {block.stop - 1}"
            moved = [
                (MISPLACED, f"interchanged with columns {each.start} to {each.stop - 1}", _swapped(weight, block, each))
                for each in blocks[i + 1 :]
            ]
            for name, words, other in (*known, (MISSING, "zero", torch.zeros_like(weight)), *moved):
                tried = other if (name, words, other) in moved else _with_columns(weight, other, block)
                if departure.explained_by(replace(operation, weight=tried).compute()):
                    yield name, f"{what}: {words}"


def _with_columns(weight: torch.Tensor, other: torch.Tensor, block: slice) -> torch.Tensor:
    tried = weight.clone()
    tried[:, block] = other[:, block]
    return tried


def _swapped(weight: torch.Tensor, a: slice, b: slice) -> torch.Tensor:
    tried = weight.clone()
    tried[:, a], tried[:, b] = weight[:, b], weight[:, a]
    return tried


def _one_element(departure: Departure, tensor: str, row: int, rest: torch.Tensor) -> Iterator[tuple[str, str]]:
    """Yield the one element of a weight that is not what it should be, if that explains a feature's difference."""
    operation = departure.operation
    if isinstance(operation, Norm):
        yield "one element", f"{tensor}[{row}]"
    if not isinstance(operation, Linear):
        return
    x = operation.x.flatten(1)
    factors = (x * rest[:, None]).sum(0) / x.square().sum(0)
    left = (rest[:, None] - x * factors).abs().amax(0)
    column = int(left.argmin())
    if float(left[column]) <= 1e-3 * float(rest.abs().max()):
        was = float(operation.weight[row, column])
        words = f"{tensor}[{row}, {column}] is {was + float(factors[column]):.6g}, expected {was:.6g}"
        yield "one element", words


def _of_head(
    departure: Departure, tensor: str, others: list[tuple[str, str, LayerOperation]]
) -> Iterator[tuple[str, str]]:
    operation = departure.operation
    assert isinstance(operation, LogitsHead)
    for name, words, other in others:
        if departure.explained_by(other.compute()):
            yield name, f"{tensor}: {words}"
    rows = operation.weight
    for parts in _PARTS:
        size = -(-len(rows) // parts)
        for i in range(parts):
            block = slice(i * size, min((i + 1) * size, len(rows)))
            zeroed = rows.clone()
            zeroed[block] = 0
            if departure.explained_by(replace(operation, weight=zeroed).compute()):
                yield MISSING, f"{tensor}, rows {block.start} to {block.stop - 1}: zero"
        turned = torch.cat([rows[size:], rows[:size]])
        if parts == 2 and departure.explained_by(replace(operation, weight=turned).compute()):
            yield MISPLACED, f"{tensor}: its halves are interchanged"
