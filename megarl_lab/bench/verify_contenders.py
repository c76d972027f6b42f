"""One verifier in a process of its own, for megarl_lab.bench.verify.

`python -m megarl_lab.bench.verify_contenders NAME` reads lines `FILE START END` and answers each with a line of JSON.
Peers run in an interpreter of their own, which has no megarl, so nothing of it is imported here at the top.
"""

import importlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megarl_lab.bench.verify_items import Item, load

# None where no verdict is claimed.
Verdicts = list[float | None]
Verify = Callable[[list[Item]], tuple[Verdicts, dict[str, Any]]]
FORK_LIMIT_S = 1.0


def pool(num_workers: int, soft_limit_s: float) -> Verify:
    """Ours; further figures say how long jobs took and what became of the workers."""
    from megarl.rewards.verifier import JobResult, VerifierJob, VerifierOptions, VerifierPool
    from megarl_lab.bench import verify_scorer

    scorer = f"{verify_scorer.__name__}:{verify_scorer.score.__name__}"
    options = VerifierOptions(
        num_workers=num_workers,
        soft_limit_s=soft_limit_s,
        deadline_s=soft_limit_s + 1.0,
        preload=(f"{verify_scorer.__name__}:{verify_scorer.warm_up.__name__}",),
    )
    verifier = VerifierPool(options)

    def job(item: Item) -> VerifierJob:
        return VerifierJob(
            data_source="bench",
            response=item.response,
            ground_truth=item.gold,
            function=scorer,
            extra_info={"block_signals": item.kind == "blocking"},
        )

    def value(verdict: JobResult) -> float | None:
        return verdict.reward.score if verdict.reward and verdict.outcome == "scored" else None

    def verify(items: list[Item]) -> tuple[Verdicts, dict[str, Any]]:
        before = verifier.statistics()
        verdicts = verifier.score_all(map(job, items))
        after = verifier.statistics()
        names = ("correct", "wrong", "parse_failed", "timed_out", "crashed", "replaced")
        counts = {name: getattr(after, name) - getattr(before, name) for name in names}
        latest = max(verdict.seconds for verdict in verdicts)
        late = sum(verdict.seconds > options.deadline_s + 1 for verdict in verdicts)
        figures = {"max_seconds": latest, "late": late, "workers": live_workers(), "expected": num_workers + 1}
        return [value(verdict) for verdict in verdicts], {**counts, **figures}

    def live_workers() -> int:
        """Children of our child, the fork server, once it has had time to replace the last one."""
        time.sleep(0.2)
        [server] = children(os.getpid())
        return len(children(server))

    verify([Item(response="$\\boxed{1}$", gold="1")] * num_workers)
    return verify


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text(encoding="utf-8").split()]


def trl() -> Verify:
    accuracy_reward = importlib.import_module("trl.rewards").accuracy_reward

    def verify(items: list[Item]) -> tuple[Verdicts, dict[str, Any]]:
        completions = [[{"role": "assistant", "content": item.response}] for item in items]
        return accuracy_reward(completions, [f"${item.gold}$" for item in items]), {}

    verify([Item(response="$\\boxed{1}$", gold="2")])
    return verify


def verl() -> Verify:
    compute_score = importlib.import_module("verl.utils.reward_score.math_verify").compute_score

    def verify(items: list[Item]) -> tuple[Verdicts, dict[str, Any]]:
        return [compute_score(item.response, item.gold) for item in items], {}

    verify([Item(response="$\\boxed{1}$", gold="2")])
    return verify


def fork() -> Verify:
    """A child per item, killed when its time is over."""
    from megarl_lab.bench.verify_scorer import score_plain, warm_up

    warm_up()

    def verify_one(item: Item) -> float | None:
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            result = score_plain(item.response, item.gold, {})
            os.write(write_end, b"1" if result.correct else b"?" if result.details["parse_failed"] else b"0")
            os._exit(0)
        os.close(write_end)
        in_time = select.select([read_end], [], [], FORK_LIMIT_S)[0]
        said = os.read(read_end, 1) if in_time else b""
        os.close(read_end)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return float(said) if said in (b"0", b"1") else None

    def verify(items: list[Item]) -> tuple[Verdicts, dict[str, Any]]:
        return [verify_one(item) for item in items], {}

    return verify


CONTENDERS: dict[str, Callable[[], Verify]] = {
    "megarl": lambda: pool(2, 1.0),
    "megarl, 1 worker": lambda: pool(1, 1.0),
    "megarl, limit 5 s": lambda: pool(2, 5.0),
    "TRL accuracy_reward": trl,
    "verl math_verify": verl,
    "fork per item": fork,
}
PEERS = ("TRL accuracy_reward", "verl math_verify")


def main() -> None:
    verify = CONTENDERS[sys.argv[1]]()
    # Output of libraries must not come between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        file, start, end = line.rsplit(maxsplit=2)
        items = load(Path(file))[int(start) : int(end)]
        began = time.monotonic()
        verdicts, figures = verify(items)
        record = {"seconds": time.monotonic() - began, "verdicts": verdicts, **figures}
        print(json.dumps(record), file=answers, flush=True)


if __name__ == "__main__":
    main()
