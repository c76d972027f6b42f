"""Run `megarl ARGUMENTS` with response lengths that are drawn from a log-normal distribution.

    python -m megarl_lab.bench.async_run [--paced] MEAN SIGMA CAP ARGUMENTS

Every request may have as many tokens as its seed draws; a model of random weights rarely ends a response earlier. With
`--paced`, trainer and engines keep the pace of `megarl_lab.bench.paced`.
"""

import math
import random
import sys
from collections.abc import Sequence
from typing import Any

from megarl.host.device.platform import apply_environment

apply_environment()

from megarl import cli  # noqa: E402
from megarl.rollout import vllm_source  # noqa: E402
from megarl.rollout.engine import GenerationRequest  # noqa: E402
from megarl_lab.bench.paced import pace_driver  # noqa: E402


def main(argv: Sequence[str]) -> None:
    if argv[0] == "--paced":
        pace_driver()
        argv = argv[1:]
    mean, sigma, cap = map(float, argv[:3])

    def drawn(*, seed: int, max_tokens: int, **given: Any) -> GenerationRequest:
        length = random.Random(seed).lognormvariate(math.log(mean) - sigma**2 / 2, sigma)
        limit = int(min(cap, max_tokens, max(4.0, length)))
        return GenerationRequest(seed=seed, max_tokens=limit, **given)

    vllm_source.GenerationRequest = drawn  # type: ignore[assignment, attr-defined]
    cli.main(list(argv[3:]))


if __name__ == "__main__":
    main(sys.argv[1:])
