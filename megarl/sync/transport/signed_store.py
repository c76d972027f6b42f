"""Exchange signed messages through a store without passwords, between processes that share a secret.

A value carries a code (HMAC) of the secret. A signal has no value; its code is in its key, so that only who knows the
secret knows where to write. Waiting for a signal so takes no more round trips than without a code.
"""

import hmac

import torch.distributed as dist

from megarl.errors import WeightSyncError
from megarl.host.store import read_value

_CODE_CHARS = 64
# How long a value that is known to be there may take.
_READ_S = 30.0


class SignedStore:
    """A client of the store at an address, which believes only processes with the same secret.

    Any user who reaches the port of a TCPStore may still delete or overwrite values, which makes readers fail.
    """

    def __init__(self, store: dist.Store, secret: bytes, address: str) -> None:
        self._store, self._secret, self._address = store, secret, address

    def set(self, key: str, value: str = "") -> None:
        """Write a value under a key."""
        self._store.set(key, self._code(key, value) + value)

    def get(self, key: str, timeout_s: float) -> str | None:
        """Wait until a key is set; return its value, None after `timeout_s`; WeightSyncError if it is forged."""
        if (found := read_value(self._store, key, timeout_s)) is None:
            return None
        text = found.decode(errors="replace")
        code, value = text[:_CODE_CHARS], text[_CODE_CHARS:]
        if not hmac.compare_digest(code.encode(), self._code(key, value).encode()):
            raise WeightSyncError(
                f"the message {key!r} in the weight sync's store at {self._address} is not from "
                f"this run: somebody else writes there; start the run again, where nobody else reaches this address"
            )
        return value

    def is_set(self, key: str) -> bool:
        """Return whether a key is set now; a value that was written without the secret does not count."""
        try:
            return self._store.check([key]) and self.get(key, _READ_S) is not None
        except WeightSyncError:
            return False

    def _code(self, key: str, value: str | None = None) -> str:
        # A key has no zero byte, so that no other key and value, and no signal, have the same text.
        text = key if value is None else f"{key}\0{value}"
        return hmac.new(self._secret, text.encode(), "sha256").hexdigest()
