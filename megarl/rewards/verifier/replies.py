"""What a worker answers, as JSON: it reads what models wrote, so nothing it sends is unpickled."""

import json
import math
from dataclasses import asdict, dataclass
from typing import Any, get_args

from megarl.errors import ConfigError, DataError, NonFiniteError, RunError
from megarl.rewards.registry import PARSE_FAILED
from megarl.rewards.verifier.types import Outcome
from megarl.types import Reward

# Mistakes of whoever runs the pool, not of a response: they are raised where the verdict is asked for.
ERRORS: dict[str, type[Exception]] = {
    error.__name__: error for error in (ConfigError, DataError, NonFiniteError, RunError)
}
_MAX_REASON_CHARS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """`error` names one of ERRORS; otherwise `outcome` and, if the scorer gave one, `reward` are set."""

    outcome: Outcome = "crashed"
    reward: Reward | None = None
    error: str = ""
    reason: str = ""
    resident_mib: float = 0.0

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, message: bytes) -> "Reply":
        """ValueError if that is no reply."""
        try:
            fields = json.loads(message)
            reward = fields.pop("reward")
            reply = cls(reward=None if reward is None else Reward(**reward), **fields)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"the worker process sent what is no reply: {message[:80]!r}") from error
        if reply.outcome not in get_args(Outcome) or reply.error not in ("", *ERRORS):
            raise ValueError(f"the worker process replied {reply.outcome!r}, {reply.error!r}")
        return reply


def reply_to(result: Any, function: str) -> Reply:
    """The reply for what a scorer returned; ConfigError or NonFiniteError if that is no reward."""
    if not isinstance(result, Reward):
        raise ConfigError(f"scorer {function!r} returned {type(result).__name__}, expected a megarl.types.Reward")
    # Numbers of numpy are none of JSON's.
    details = {str(name): float(value) for name, value in result.details.items()}
    reward = Reward(score=float(result.score), correct=bool(result.correct), details=details)
    if not math.isfinite(reward.score):
        raise NonFiniteError(f"scorer {function!r} returned a score of {reward.score}; scores are finite numbers")
    return Reply(outcome="parse_failed" if details.get(PARSE_FAILED) else "scored", reward=reward)


def failure(error: Exception) -> Reply:
    """The reply for what a scorer raised."""
    known = next((name for name, kind in ERRORS.items() if isinstance(error, kind)), "")
    text = str(error) if known else f"{type(error).__name__}: {error}"
    return Reply(error=known, reason=text[:_MAX_REASON_CHARS])
