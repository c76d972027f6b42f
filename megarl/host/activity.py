"""Say what a command is doing, so that it is never silent: a line of tqdm on a terminal, plain lines elsewhere."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from megarl.host.device.platform import apply_environment
from megarl.host.streams import losing_lines, print_lines
from megarl.host.unicode import visible

# How often the live line is renewed, and after what silence a plain one is printed; the first comes sooner.
LIVE_S, SILENCE_S, FIRST_S = 0.5, 4.0, 1.0

_doing: list[tuple[Callable[[], str], float]] = []
# How many activities have begun in this process.
_num_begun = [0]
# When the command last printed something (`time.monotonic`).
_printed = [0.0]


@contextlib.contextmanager
def doing(what: str | Callable[[], str]) -> Iterator[None]:
    """Within this context, this process does `what`; a function is asked again whenever somebody looks."""
    _num_begun[0] += 1
    _doing.append((what if callable(what) else lambda: what, time.time()))
    try:
        yield
    finally:
        _doing.pop()


def current_activity() -> tuple[str, float] | None:
    """Return what this process does and since when (seconds since 1970), or None between two activities."""
    try:
        what, since = _doing[-1]
    except IndexError:
        return None
    return what(), since


def doing_now(otherwise: str) -> str:
    """Return what this process does, for messages; `otherwise` between two activities."""
    now = current_activity()
    return otherwise if now is None else now[0]


def printed() -> None:
    """Note that the command has just printed a line, so that `LiveStatus` need not."""
    _printed[0] = time.monotonic()


class LiveStatus(contextlib.AbstractContextManager["LiveStatus"]):
    """A thread that shows what the process does, and for how long, while the command runs.

    On a terminal, a line below the progress bar is renewed every `LIVE_S`. Elsewhere a line is printed whenever nothing
    else was for `SILENCE_S`.
    """

    def __init__(self, *, stream: TextIO | None = None, silence_s: float = SILENCE_S) -> None:
        self._stream, self._silence_s = sys.stdout if stream is None else stream, silence_s
        self._ended = threading.Event()
        self._line: Any = None
        if self._stream.isatty():
            # Imported here: `megarl doctor` answers where nothing is installed.
            from tqdm import tqdm

            self._line = tqdm(file=self._stream, bar_format="{desc}", position=1, leave=False, dynamic_ncols=True)
        _printed[0] = time.monotonic() - silence_s + FIRST_S
        self._thread = threading.Thread(target=self._show, daemon=True)

    def __enter__(self) -> "LiveStatus":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        if self._line is not None:
            self._line.close()

    def _show(self) -> None:
        while not self._ended.wait(LIVE_S):
            what, since = current_activity() or ("", time.time())
            text = f"{what}, {time.time() - since:.0f} s" if what else ""
            if self._line is not None:
                self._line.set_description_str(visible(text))
            elif text and time.monotonic() - _printed[0] >= self._silence_s:
                printed()
                # A reader that has gone away is noticed by the command itself, when it prints.
                with contextlib.suppress(BrokenPipeError):
                    print_lines(f"… {text}", file=self._stream)


@contextlib.contextmanager
def shown() -> Iterator[None]:
    """Prepare the environment for a command, and show what the command does in this context."""
    apply_environment()
    # Between two activities, it is no longer loading.
    with losing_lines(), LiveStatus(), doing(lambda: "working" if _num_begun[0] > 1 else "loading megarl"):
        yield
