"""Answers made to hang, crash or bloat a verifier, through the pool: does every verdict come in time, and what is left?

    python -m megarl_lab.bench.verify_adversarial --out runs/adversarial [--count 10000]

math-verify gets every response as it is, without a cap or a shortcut, in more workers than the machine has cores. The
thread that submits takes the trainer's part: how long a submission took, and how late a tick of 10 ms was, say whether
it was kept waiting. Memory is the process's own and that of the fork server and all workers.
"""

import argparse
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from dataclasses import asdict, dataclass
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from megarl.rewards.verifier import JobResult, VerifierJob, VerifierOptions, VerifierPool
from megarl_lab.bench import verify_scorer
from megarl_lab.bench.verify_contenders import children

GOLDS = ("x^2+1", r"\frac{1}{2}", "(1, 2)", "7", r"\sqrt{2}", r"\{1, 2, 3\}", r"\sin(x)")
OPTIONS = VerifierOptions(
    num_workers=6,
    soft_limit_s=0.1,
    deadline_s=0.6,
    memory_limit_mib=512,
    recycle_mib=256,
    max_response_chars=1 << 20,
    preload=(f"{verify_scorer.__name__}:{verify_scorer.warm_up.__name__}",),
)
TICK_S = 0.01
_ATOMS = ("x", "y", "0", "1", "2", "17", "0.5", r"\pi", "e", r"\infty", "i", r"\alpha", "n")
_NESTS = (("(", ")"), ("{", "}"), (r"\sqrt{", "}"), (r"\frac{1}{", "}"), (r"\left(", r"\right)"), ("x^{", "}"))


def nested(rng: random.Random) -> str:
    opening, closing = rng.choice(_NESTS)
    depth = rng.choice((10, 30, 100, 300, 1000, 3000))
    return opening * depth + rng.choice(_ATOMS) + closing * (depth if rng.random() < 0.8 else rng.randint(0, depth))


def power(rng: random.Random) -> str:
    base = rng.choice(("9", "10", "x", "(x+1)", r"(\sqrt{2}+\sqrt{3}+\sqrt{5})", "0.99"))
    form = rng.choice((f"{base}^{{{10 ** rng.randint(2, 12)}}}", base + "^{9" * rng.randint(1, 6)))
    return form + "}" * (form.count("{") - form.count("}"))


def factorials(rng: random.Random) -> str:
    number = str(rng.randint(3, 10 ** rng.randint(1, 7)))
    return "(" * (depth := rng.randint(0, 5)) + number + "!" + ")!" * depth + rng.choice(("", "-1", "/7!"))


def control_characters(rng: random.Random) -> str:
    pool = [chr(i) for i in range(32)] + ["\x7f", "\x85", "\u2028", "\u202e", "\ufeff", "\ud800", "\U0010ffff", *_ATOMS]
    return "".join(rng.choices(pool, k=rng.randint(1, 2000)))


def megabyte(rng: random.Random) -> str:
    unit = rng.choice(("1+", "9", r"\frac{1}{2}+", "(", "x", r"\boxed{", "$", "1, ", "\n", r"\text{ and }", "{}"))
    return unit * ((1 << 20) // len(unit))


def calculus(rng: random.Random) -> str:
    body = rng.choice(("x^x", r"\sin(x^2)e^{x}", r"\frac{1}{\ln(x)+\cos(x)}", r"x^{50}\tan^{30}(x)", r"|x|^{\sqrt{x}}"))
    head = rng.choice((r"\int_0^{10} ", r"\sum_{x=1}^{1000000} ", r"\prod_{x=1}^{100000} ", r"\lim_{x \to 0} "))
    return head + body + (" dx" if "int" in head else "")


LATEX = st.recursive(
    st.sampled_from(_ATOMS),
    lambda inner: st.one_of(
        st.tuples(
            inner, st.sampled_from(("+", "-", "*", "^", "_", "=", "<", r"\cdot ", r"\div ", ",", "!")), inner
        ).map("".join),
        st.builds(r"\frac{{{}}}{{{}}}".format, inner, inner),
        st.builds("{}^{{{}}}".format, inner, inner),
        st.builds(r"\sqrt[{}]{{{}}}".format, inner, inner),
        st.builds(
            r"\{}{{{}}}".format, st.sampled_from(("sin", "log", "boxed", "text", "binom", "begin{matrix}")), inner
        ),
        st.builds(r"\left[{}, {}\right)".format, inner, inner),
    ),
    max_leaves=25,
)


def hypothesis_made(count: int, seed: int) -> list[str]:
    """Formulas, many of them malformed, and any text."""
    found: list[str] = []

    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.one_of(LATEX, LATEX, LATEX, st.text(max_size=200)))
    def collect(text: str) -> None:
        found.append(text)

    collect()
    # The library stops early where it finds that nothing new comes.
    return [found[i % len(found)] for i in random.Random(seed).sample(range(max(count, len(found))), count)]


KINDS: dict[str, Callable[[random.Random], str]] = {
    each.__name__: each for each in (nested, power, factorials, control_characters, megabyte, calculus)
}


def make_responses(count: int, seed: int) -> Iterator[tuple[str, str]]:
    """Kind and response; two fifths are made by hypothesis, the kinds of the others are equally frequent."""
    rng = random.Random(seed)
    made = iter(hypothesis_made(count - count * 3 // 5, seed))
    for i in range(count):
        kind = "hypothesis" if i % 5 < 2 else rng.choice(list(KINDS))
        answer = next(made, "x") if kind == "hypothesis" else KINDS[kind](rng)
        yield kind, answer if kind == "megabyte" and i % 2 else f"The answer is $\\boxed{{{answer}}}$."


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """MiB resident of this process, and of its fork server and workers; how many workers there are."""

    judged: int
    parent_mib: float
    workers_mib: float
    num_workers: int


def checkpoint(judged: int, server: int) -> MemoryReading:
    workers = children(server)
    total = sum(resident_mib(pid) for pid in (server, *workers))
    return MemoryReading(
        judged=judged, parent_mib=resident_mib(os.getpid()), workers_mib=total, num_workers=len(workers)
    )


def fork_server(command: bytes = b"megarl.rewards.verifier") -> int:
    """The pool's, among this process's children."""
    [server] = (pid for pid in children(os.getpid()) if command in Path(f"/proc/{pid}/cmdline").read_bytes())
    return server


def resident_mib(pid: int) -> float:
    """Proportional share: pages that workers share with the fork server count once."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


@dataclass(slots=True)
class Caller:
    """The waits of the thread that submits, in seconds."""

    longest_submit: float = 0.0
    latest_tick: float = 0.0

    def tick(self) -> None:
        began = time.monotonic()
        time.sleep(TICK_S)
        self.latest_tick = max(self.latest_tick, time.monotonic() - began - TICK_S)


def run(pool: VerifierPool, count: int, seed: int) -> tuple[dict[str, list[JobResult]], list[MemoryReading], Caller]:
    """A tenth at a time, as a trainer would with its steps."""
    rng, caller = random.Random(seed), Caller()
    verdicts: dict[str, list[JobResult]] = {}
    checkpoints = []
    responses = list(make_responses(count, seed))
    size = max(1, count // 10)
    for start in range(0, count, size):
        pending = []
        for kind, response in responses[start : start + size]:
            job = VerifierJob(
                data_source=kind,
                response=response,
                ground_truth=rng.choice(GOLDS),
                function=f"{verify_scorer.__name__}:{verify_scorer.score_plain.__name__}",
            )
            began = time.monotonic()
            pending.append((kind, pool.submit(job)))
            caller.longest_submit = max(caller.longest_submit, time.monotonic() - began)
        futures = [future for _, future in pending]
        while wait(futures, timeout=0).not_done:
            caller.tick()
        for kind, future in pending:
            verdicts.setdefault(kind, []).append(future.result())
        time.sleep(0.5)
        checkpoints.append(checkpoint(start + len(pending), fork_server()))
        print(checkpoints[-1], flush=True)
    return verdicts, checkpoints, caller


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    idle = Caller()
    with VerifierPool(OPTIONS) as pool:
        for _ in range(300):
            idle.tick()
        verdicts, checkpoints, caller = run(pool, options.count, options.seed)
        statistics = pool.statistics()
    limit = OPTIONS.deadline_s + 1
    kinds = {
        kind: {
            **Counter(verdict.outcome for verdict in found),
            "longest_s": max(verdict.seconds for verdict in found),
            "late": sum(verdict.seconds > limit for verdict in found),
        }
        for kind, found in sorted(verdicts.items())
    }
    record = {
        "seconds": time.monotonic() - began,
        "kinds": kinds,
        "statistics": asdict(statistics),
        "checkpoints": [asdict(each) for each in checkpoints],
        "caller": asdict(caller),
        "latest_tick_of_an_idle_caller": idle.latest_tick,
    }
    (options.out / "adversarial.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
