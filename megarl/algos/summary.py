"""What is logged about a tensor."""

from torch import Tensor


def summary(prefix: str, values: Tensor) -> dict[str, float]:
    """`prefix`/{mean,max,min} of `values`; nothing if there are none."""
    if not values.numel():
        return {}
    stats = {"mean": values.mean(), "max": values.max(), "min": values.min()}
    return {f"{prefix}/{name}": float(value.item()) for name, value in stats.items()}
