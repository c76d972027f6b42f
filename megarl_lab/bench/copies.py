"""Time copies between host and device, and out of another process's memory:

    python -m megarl_lab.bench.copies --device cuda --out copies.json

Prints GB/s, 10⁹ bytes a second, counted once; exits with 1 if a copy differs from its source. With CUDA the other
process opens the memory by CUDA IPC, as weights reach an engine on the same device; on CPU it is shared memory.
"""

import argparse
import json
import os
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megarl.host.device.platform import PLATFORMS, apply_environment, platform
from megarl.record.text_table import align

_WARM_UP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedCopy:
    """Seconds of each copy of `num_bytes`, and whether the last was equal to its source."""

    name: str
    num_bytes: int
    seconds: list[float]
    is_equal: bool

    @property
    def row(self) -> tuple[str, ...]:
        rates = sorted(self.num_bytes / 1e9 / each for each in self.seconds)
        verdict = "equal" if self.is_equal else "DIFFERS"
        return self.name, f"{statistics.median(rates):.1f}", f"{rates[0]:.1f}-{rates[-1]:.1f}", verdict


def measure(name: str, source: Any, target: Any, repeats: int) -> TimedCopy:
    """Copy a tensor over another, after two copies that are not timed."""
    import torch

    seconds = []
    for _ in range(_WARM_UP + repeats):
        platform().synchronize()
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        platform().synchronize()
        seconds.append(time.perf_counter() - began)
    device = platform().device()
    is_equal = torch.equal(source.to(device), target.to(device))
    return TimedCopy(name=name, num_bytes=source.nbytes, seconds=seconds[_WARM_UP:], is_equal=is_equal)


def copies(num_bytes: int, repeats: int) -> list[TimedCopy]:
    """Each kind of copy of random bytes."""
    import torch

    platform().activate()
    on_device = torch.randint(256, (num_bytes,), dtype=torch.uint8, device=platform().device())
    pageable, pinned, other = (
        torch.empty(num_bytes, dtype=torch.uint8),
        platform().host_buffer(num_bytes),
        torch.empty_like(on_device),
    )
    found = [
        measure("device to pageable host memory", on_device, pageable, repeats),
        measure("device to page-locked host memory", on_device, pinned, repeats),
        measure("pageable host memory to device", pageable, other, repeats),
        measure("page-locked host memory to device", pinned, other, repeats),
        measure("device to device", on_device, other, repeats),
    ]
    del pageable, pinned, other
    return [*found, _from_another_process(on_device, repeats)]


def _from_another_process(on_device: Any, repeats: int) -> TimedCopy:
    import torch.multiprocessing

    spawn = torch.multiprocessing.get_context("spawn")
    there, back = spawn.SimpleQueue(), spawn.SimpleQueue()
    process = spawn.Process(target=_receive, args=(there, back, repeats), daemon=True)
    process.start()
    there.put(on_device)
    # The memory must stay until the other process has ended.
    process.join()
    if process.exitcode:
        raise SystemExit(f"the other process ended with exit code {process.exitcode}; its traceback is above")
    copy: TimedCopy = back.get()
    return copy


def _receive(there: Any, back: Any, repeats: int) -> None:
    import torch

    platform().activate()
    source = there.get()
    back.put(measure("another process's memory to one's own", source, torch.empty_like(source), repeats))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m megarl_lab.bench.copies", description="Time copies.")
    parser.add_argument("--device", choices=sorted(PLATFORMS), default="cpu")
    parser.add_argument("--mib", type=int, default=2048, help="size of each copy")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path, required=True, help="a JSON file")
    arguments = parser.parse_args(argv)
    os.environ["MEGARL_DEVICE"] = arguments.device
    apply_environment()
    found = copies(arguments.mib << 20, arguments.repeats)
    arguments.out.write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n", encoding="utf-8")
    rows = [("copy", "GB/s", "range", "verdict"), *(each.row for each in found)]
    print("\n".join(align(rows, left=(0, 3))), flush=True)
    raise SystemExit(not all(each.is_equal for each in found))


if __name__ == "__main__":
    main()
