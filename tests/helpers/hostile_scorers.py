"""Scorers that behave, and scorers that do what no text should be able to make one do."""

import ctypes
import hashlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from megarl.errors import DataError
from megarl.types import Reward

Info = Mapping[str, Any]
_kept: list[bytes] = []


def same_text(response: str, ground_truth: str, extra_info: Info, *, worth: float = 1.0) -> Reward:
    correct = response == ground_truth
    return Reward(score=worth * correct, correct=correct, details={"parse_failed": float(not response)})


def process(response: str, ground_truth: str, extra_info: Info) -> Reward:
    """Where it runs, and what that process has imported."""
    heavy = sum(name in sys.modules for name in ("torch", "ray", "vllm", "megatron", "transformers"))
    limits = [line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in line]
    details = {"pid": os.getpid(), "parent": os.getppid(), "heavy": heavy, "resident_kib": float(limits[0])}
    return Reward(score=1.0, correct=True, details=details)


def length(response: str, ground_truth: str, extra_info: Info) -> Reward:
    return Reward(score=len(response), correct=response.endswith(ground_truth))


def sleep(response: str, ground_truth: str, extra_info: Info) -> Reward:
    time.sleep(float(response))
    return Reward(score=1.0, correct=True)


def sleep_for_ever(response: str, ground_truth: str, extra_info: Info) -> NoReturn:
    while True:
        time.sleep(60)


def loop(response: str, ground_truth: str, extra_info: Info) -> NoReturn:
    while True:
        pass


def swallow(response: str, ground_truth: str, extra_info: Info) -> NoReturn:
    """As destructors and careless packages do."""
    while True:
        try:
            time.sleep(60)
        except BaseException:
            continue


def swallow_once(response: str, ground_truth: str, extra_info: Info) -> NoReturn:
    try:
        loop(response, ground_truth, extra_info)
    except BaseException:
        loop(response, ground_truth, extra_info)


def block_signals(response: str, ground_truth: str, extra_info: Info) -> NoReturn:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    loop(response, ground_truth, extra_info)


def change_signals(response: str, ground_truth: str, extra_info: Info) -> Reward:
    """For good."""
    for signum in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(signum, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    return Reward(score=1.0, correct=True)


def in_c(response: str, ground_truth: str, extra_info: Info) -> NoReturn:
    """Python's signal handlers do not run meanwhile."""
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
    raise AssertionError("came to an end")


def stop(response: str, ground_truth: str, extra_info: Info) -> NoReturn:
    os.kill(os.getpid(), signal.SIGSTOP)
    raise AssertionError("went on")


def exit_at_once(response: str, ground_truth: str, extra_info: Info) -> NoReturn:
    os._exit(0)


def leave(response: str, ground_truth: str, extra_info: Info) -> NoReturn:
    sys.exit(3)


def segfault(response: str, ground_truth: str, extra_info: Info) -> NoReturn:
    ctypes.string_at(0)
    raise AssertionError("read address 0")


def eat_memory(response: str, ground_truth: str, extra_info: Info) -> NoReturn:
    while True:
        _kept.append(bytes(1 << 24))


def keep_memory(response: str, ground_truth: str, extra_info: Info) -> Reward:
    _kept.append(b"x" * (int(response) << 20))
    return Reward(score=1.0, correct=True)


def flood(response: str, ground_truth: str, extra_info: Info) -> Reward:
    for _ in range(8):
        os.write(1, b"x" * (1 << 20))
        os.write(2, b"x" * (1 << 20))
        print("x" * (1 << 16))
    return Reward(score=1.0, correct=True)


def garble(response: str, ground_truth: str, extra_info: Info) -> NoReturn:
    """Writes into the worker's own connection."""
    assert os.readlink("/proc/self/fd/3").startswith("socket:")
    os.write(3, response.encode("latin-1"))
    loop(response, ground_truth, extra_info)


def start_child(response: str, ground_truth: str, extra_info: Info) -> NoReturn:
    child = subprocess.Popen(["sleep", "600"])
    Path(extra_info["file"]).write_text(str(child.pid))
    loop(response, ground_truth, extra_info)


def read_input(response: str, ground_truth: str, extra_info: Info) -> Reward:
    return Reward(score=1.0, correct=sys.stdin.read() == "")


def nest(response: str, ground_truth: str, extra_info: Info) -> NoReturn:
    nest(response, ground_truth, extra_info)


def fail(response: str, ground_truth: str, extra_info: Info) -> NoReturn:
    raise ZeroDivisionError("by hand")


def bad_truth(response: str, ground_truth: str, extra_info: Info) -> NoReturn:
    raise DataError(f"ground truth is {ground_truth!r}")


def a_number(response: str, ground_truth: str, extra_info: Info) -> float:
    return 1.0


def not_finite(response: str, ground_truth: str, extra_info: Info) -> Reward:
    return Reward(score=math.nan, correct=False)


def start_thread() -> None:
    import threading

    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
