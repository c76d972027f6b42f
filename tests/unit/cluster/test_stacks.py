"""How a process's activity reads: from stacks as Python's faulthandler writes them, the innermost call first."""

import os
import signal
import subprocess
import sys

import psutil

from megarl.cluster.stacks import Activity, activities
from tests.helpers.waiting import wait_until

IN_COLLECTIVE = """Current thread 0x00007f0000000000 (most recent call first):
  File "/v/torch/distributed/distributed_c10d.py", line 3104 in all_reduce
  File "/v/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/v/megatron/core/tensor_parallel/mappings.py", line 31 in _reduce
  File "/src/megarl/parallel/passes.py", line 88 in forward
  File "/src/megarl/parallel/worker.py", line 12 in update
"""


def test_a_process_in_a_collective() -> None:
    activity = Activity(state="sleeping", stacks=IN_COLLECTIVE)
    assert str(activity) == "waits in all_reduce, called at megarl/parallel/passes.py:88"


def test_a_process_elsewhere() -> None:
    ours = "\n".join(IN_COLLECTIVE.splitlines()[4:])
    assert str(Activity(state="running", stacks=ours)) == "is at megarl/parallel/passes.py:88"
    assert str(Activity(state="running", stacks="")) == "is running"


def test_in_a_checkout_called_megarl_other_packages_are_not_ours() -> None:
    thread = 'Thread 0x00007f0000000001 (most recent call first):\n  File "/v/ray/gc.py", line 9 in run\n'
    stacks = (thread + IN_COLLECTIVE).replace("/v/", "/megarl/.venv/").replace("/src/megarl/p", "/megarl/megarl/p")
    activity = Activity(state="sleeping", stacks=stacks)
    assert str(activity) == "waits in all_reduce, called at megarl/parallel/passes.py:88"


def test_a_process_that_cannot_tell() -> None:
    """Stopped, and ended; what it wrote before does not count."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        os.kill(process.pid, signal.SIGSTOP)
        wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, "the process to stop")
        assert str(activities([process.pid], "/nowhere")[process.pid]) == "is stopped"
    finally:
        process.kill()
        process.wait()
    assert str(activities([process.pid], "/nowhere")[process.pid]) == "is gone"
    assert str(Activity(state="gone", stacks=IN_COLLECTIVE)) == "is gone"
