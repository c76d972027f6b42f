"""Import what ranks and engines need, then fork Ray's workers: `python -m megarl.cluster.preload rank=FD engine=FD`.

There is a server for each kind, since Megatron and vLLM each change torch to their needs; both fork from one process
that has imported torch.
"""

import gc
import os
import sys
from collections.abc import Sequence

from megarl.host.fork_server import serve_forks


def main(argv: Sequence[str]) -> None:
    """Serve forks for each kind on its listening descriptor.

    Ray is not imported, though vLLM would import it if it could: forks of a process that has cannot reach its servers.
    """
    # Imports make hardly any cycles, and to look for them takes a fifth of their time.
    gc.disable()
    import torch  # noqa: F401

    sys.modules["ray"] = None  # type: ignore[assignment]
    *others, last = argv
    mine = next((each for each in others if os.fork() == 0), last)
    kind, _, listener = mine.partition("=")
    if kind == "rank":
        from megarl.parallel.worker import RankWorker

        RankWorker(0).prepare()
    else:
        from megarl.rollout.prepare import import_vllm

        import_vllm()
    del sys.modules["ray"]
    gc.enable()
    serve_forks(int(listener))


if __name__ == "__main__":
    main(sys.argv[1:])
