"""Show live progress: one line rewritten in place on a terminal; in a log file a line at most every 2 seconds."""

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TextIO

from tqdm import tqdm

from megarl.host.activity import printed
from megarl.host.streams import print_lines, printing, shown
from megarl.host.unicode import visible

# Steps whose mean duration predicts the rest: enough to even out validation, few enough to follow changes.
ETA_WINDOW_STEPS = 10
# Log files get a line per step, but not more often than this.
PLAIN_INTERVAL_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressValues:
    """The values that the progress line shows for a step; those that are None are left out.

    reverse_kl: of the policy from a teacher.
    """

    reward: float | None = None
    reverse_kl: float | None = None
    loss: float | None = None
    accuracy: float | None = None
    response_length: float | None = None
    mismatch: float | None = None
    tokens_per_s: float | None = None

    @classmethod
    def of(cls, metrics: Mapping[str, float], *, is_judged: bool = True) -> "ProgressValues":
        """Return what the metrics of a step with rollouts say. is_judged: whether anything gives samples rewards."""
        return cls(
            reward=metrics.get("critic/rule_score/mean") if is_judged else None,
            reverse_kl=metrics.get("distill/reverse_kl"),
            response_length=metrics.get("response_length/mean"),
            mismatch=metrics.get("mismatch/abs_mean"),
            tokens_per_s=metrics.get("perf/tokens_per_s"),
        )


def write_line(text: str) -> None:
    """Print a line above the live progress bar, if there is one."""
    with printing():
        tqdm.write(shown(text), file=sys.stdout)
        sys.stdout.flush()
    printed()


# Field → how it reads on the line.
_FORMATS: dict[str, str] = {
    "reward": "reward {:.3f}",
    "reverse_kl": "reverse KL {:.4f}",
    "loss": "loss {:.3f}",
    "accuracy": "accuracy {:.3f}",
    "response_length": "len {:.0f}",
    "mismatch": "mismatch {:.1e}",
    "tokens_per_s": "{:,.0f} tok/s",
}


def format_values(values: ProgressValues) -> str:
    """Format the values for the line: `reward 0.412  len 31  mismatch 1.2e-06  1,830 tok/s`."""
    given = ((text, getattr(values, name)) for name, text in _FORMATS.items())
    return "  ".join(text.format(value) for text, value in given if value is not None)


class Progress(AbstractContextManager["Progress"]):
    """A progress display of `total` steps, the first `initial` of which an earlier run has done.

    Time left is the number of remaining steps times the mean duration of the last `ETA_WINDOW_STEPS`.
    """

    def __init__(
        self,
        *,
        total: int,
        description: str,
        initial: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total
        self._description = description
        self._stream = sys.stdout if stream is None else stream
        self._clock = clock
        # Marks (step, time), one more than durations.
        self._marks: deque[tuple[int, float]] = deque([(initial, clock())], maxlen=ETA_WINDOW_STEPS + 1)
        self._last_line_s = -PLAIN_INTERVAL_S
        self._bar: tqdm[None] | None = None
        if self._stream.isatty():
            name = visible(description).replace("{", "{{").replace("}", "}}")
            self._bar = tqdm(
                total=total,
                initial=initial,
                file=self._stream,
                dynamic_ncols=True,
                mininterval=0.0,
                bar_format=f"{name} {{bar:12}} {{n_fmt}}/{{total_fmt}}  {{desc}}",
            )

    def update(self, step: int, values: ProgressValues) -> None:
        """Show that `step` steps of `total` are done."""
        self._marks.append((step, self._clock()))
        (first_step, first_s), (last_step, last_s) = self._marks[0], self._marks[-1]
        num_steps = last_step - first_step
        time_left = ""
        if num_steps > 0 and step < self._total:
            time_left = tqdm.format_interval((last_s - first_s) / num_steps * (self._total - step)) + " left"
        parts = [part for part in (time_left, format_values(values)) if part]
        if self._bar is None:
            now = self._clock()
            if step == self._total or now - self._last_line_s >= PLAIN_INTERVAL_S:
                self._last_line_s = now
                self.note("  ".join([f"{self._description} {step}/{self._total}", *parts]))
        else:
            self._bar.n = step
            self._bar.set_description_str("  ".join(parts))

    def note(self, text: str) -> None:
        """Print a line of its own; a live bar moves below it."""
        if self._bar is None:
            print_lines(text, file=self._stream)
        else:
            with printing():
                tqdm.write(shown(text), file=self._stream)
        printed()

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
