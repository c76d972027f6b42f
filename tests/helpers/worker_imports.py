"""Fork Ray's workers for stand-ins of ranks and engines: `python -m tests.helpers.worker_imports worker=FD`."""

import sys

from megarl.host.fork_server import serve_forks


def main(argument: str) -> None:
    """Import what they need, and serve forks on the descriptor. Forks of what has imported Ray cannot reach servers."""
    sys.modules["ray"] = None  # type: ignore[assignment]
    import megarl.environments.worker
    import megarl.parallel.worker
    import megarl.rollout.conversations
    import megarl.rollout.engine  # noqa: F401

    del sys.modules["ray"]
    serve_forks(int(argument.rpartition("=")[2]))


if __name__ == "__main__":
    main(sys.argv[1])
