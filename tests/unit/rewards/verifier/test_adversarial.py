"""Answers made to hang, crash or bloat a verifier: every verdict comes in time, and nothing is left."""

import os
import random
import time

import psutil

from megarl.rewards.verifier import VerifierJob, VerifierOptions, VerifierPool
from tests.helpers import plain_math
from tests.helpers.waiting import wait_until

COUNT = 96
GOLDS = ("x^2+1", r"\frac{1}{2}", "(1, 2)", "7", r"\sqrt{2}", r"\{1, 2, 3\}", r"\sin(x)")
OPTIONS = VerifierOptions(
    num_workers=4,
    soft_limit_s=0.05,
    deadline_s=0.5,
    memory_limit_mib=512,
    recycle_mib=256,
    max_response_chars=1 << 20,
    preload=(f"{plain_math.__name__}:{plain_math.warm_up.__name__}",),
)
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


KINDS = (nested, power, factorials, control_characters, megabyte, calculus)


def fork_server() -> psutil.Process:
    """The pool's, among this process's children."""
    children = psutil.Process().children()
    [server] = [child for child in children if any("megarl.rewards.verifier" in word for word in child.cmdline())]
    return server


def resident_mib(*processes: psutil.Process) -> float:
    """Proportional share: pages that workers share with the fork server count once."""
    total = 0
    for process in processes:
        try:
            total += process.memory_full_info().pss
        except psutil.NoSuchProcess:
            continue
    return total / (1 << 20)


def test_every_verdict_comes_in_time_and_nothing_is_left() -> None:
    rng, longest_submit, verdicts, workers_mib = random.Random(1), 0.0, [], []
    me = psutil.Process(os.getpid())
    with VerifierPool(OPTIONS) as pool:
        parent_mib = resident_mib(me)
        for start in range(0, COUNT, COUNT // 8):
            pending = []
            for kind in (KINDS[i % len(KINDS)] for i in range(start, start + COUNT // 8)):
                answer = kind(rng)
                job = VerifierJob(
                    data_source=kind.__name__,
                    response=answer if kind is megabyte and start % 24 else f"The answer is $\\boxed{{{answer}}}$.",
                    ground_truth=rng.choice(GOLDS),
                    function=f"{plain_math.__name__}:{plain_math.score.__name__}",
                )
                began = time.monotonic()
                pending.append(pool.submit(job))
                longest_submit = max(longest_submit, time.monotonic() - began)
            verdicts += [future.result() for future in pending]
            server = fork_server()
            workers_mib.append(resident_mib(server, *server.children()))
        grown_mib, statistics = resident_mib(me) - parent_mib, pool.statistics()

        # A worker that has been replaced may take a moment to end.
        def num_workers() -> int:
            return len(fork_server().children())

        expected = OPTIONS.num_workers + OPTIONS.num_spares
        wait_until(lambda: num_workers() == expected, f"{expected} workers", timeout_s=5.0, seen=num_workers)
    assert len(verdicts) == statistics.jobs == COUNT
    assert all(verdict.seconds < OPTIONS.deadline_s + 5 for verdict in verdicts)
    # The input is what it claims to be.
    assert statistics.timed_out > 0
    # An upper bound of what all of them may hold; without replacement a single one would get there.
    assert max(workers_mib) < 6 * OPTIONS.recycle_mib
    # Less could not be told from a busy machine.
    assert longest_submit < 1.0
    assert grown_mib < 64
