"""Questions and measurements as data; a report is one JSON file."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """Who a process is. main_grad: whether weights have main gradients. kernels: a folder with packages that are not
    installed otherwise."""

    contender: str
    rank: int
    world_size: int
    device: str
    dtype: str
    main_grad: bool
    directory: str
    kernels: str


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Size:
    """Vocabulary V, rows N and hidden size H of a problem."""

    vocab: int
    rows: int
    hidden: int

    def __str__(self) -> str:
        return f"V={self.vocab} N={self.rows}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Collectives of one pass, and the bytes that a rank hands to them."""

    num_collectives: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One contender at one size.

    memory_bytes: peak over inputs, gradients included, of the rank with most. forward_s and total_s: seconds of each
    round, of the slower rank; total is forward and backward. predicted_bytes: set if it was not run for its memory,
    of all ranks together.
    """

    contender: str
    size: Size
    memory_bytes: int | None = None
    forward: Traffic | None = None
    backward: Traffic | None = None
    forward_s: Sequence[float] = ()
    total_s: Sequence[float] = ()
    predicted_bytes: int | None = None

    @property
    def median_forward_s(self) -> float | None:
        return statistics.median(self.forward_s) if self.forward_s else None

    @property
    def median_total_s(self) -> float | None:
        return statistics.median(self.total_s) if self.total_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadAgreement:
    """How far a contender is from dense float64: quantity → largest scaled difference."""

    contender: str
    tolerance: float
    differences: Mapping[str, float]

    @property
    def agrees(self) -> bool:
        # A NaN agrees with nothing.
        return all(difference <= self.tolerance for difference in self.differences.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A whole run. main_grad: whether inputs had the weight's main gradient. relative_errors: contender → quantity →
    ‖got − dense‖ ÷ ‖dense‖ at the full vocabulary. unavailable: contender → why it could not run, or not to the end."""

    device: str
    dtype: str
    itemsize: int
    main_grad: bool
    world_size: int
    versions: Mapping[str, str]
    agreements: Sequence[HeadAgreement]
    measurements: Sequence[Measurement]
    relative_errors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    unavailable: Mapping[str, str] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
