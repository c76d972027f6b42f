"""The range of every number under `rewards`."""

from collections.abc import Mapping

from megarl.config.range import ANY_NUMBER, AT_LEAST_0, AT_LEAST_1, POSITIVE, Range

# Stands for every name of a mapping.
ANY_NAME = "NAME"

REWARD_RANGES: Mapping[str, Range] = {
    f"rewards.sources.{ANY_NAME}.correct": ANY_NUMBER,
    f"rewards.sources.{ANY_NAME}.wrong": ANY_NUMBER,
    f"rewards.sources.{ANY_NAME}.malformed": ANY_NUMBER,
    f"rewards.sources.{ANY_NAME}.format_weight": Range(holds=lambda x: 0 <= x < 1, expected="in [0, 1)"),
    "rewards.verifier.workers": AT_LEAST_1,
    "rewards.verifier.soft_limit_s": POSITIVE,
    "rewards.verifier.hard_limit_s": POSITIVE,
    "rewards.verifier.memory_mib": AT_LEAST_1,
    **{
        f"rewards.code.limits.{name}": POSITIVE
        for name in ("cpu_s", "wall_s", "memory_mib", "processes", "files_mib", "files", "output_mib")
    },
    "rewards.code.float_tolerance": Range(holds=lambda x: 0 <= x < 1, expected="in [0, 1)"),
    "rewards.code.max_tests": AT_LEAST_1,
    "rewards.code.max_timeouts": AT_LEAST_1,
    "rewards.code.workers": AT_LEAST_1,
    "rewards.code.deadline_s": POSITIVE,
    "rewards.remote.rows_per_request": AT_LEAST_1,
    "rewards.remote.timeout_s": POSITIVE,
    "rewards.remote.retries": AT_LEAST_0,
    "rewards.remote.backoff_s": AT_LEAST_0,
    "rewards.remote.value": ANY_NUMBER,
    f"rewards.hybrid.parts.{ANY_NAME}.weight": Range(holds=lambda x: x != 0, expected="not 0; leave the part out"),
}
