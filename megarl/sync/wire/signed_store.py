"""Exchange messages through a TCPStore that asks no one for a password: each value carries a code (HMAC) of its
writer's secret.
"""

import hmac
from datetime import timedelta

import torch.distributed as dist

from megarl.errors import WeightSyncError

_DIGEST = "sha256"
_CODE_CHARS = 64
# How long a value that is known to be there may take.
_READ_S = 30.0


class SignedStore:
    """A client of a TCPStore that believes only values of processes with the same secret, each under its own key.

    Any user who reaches the store's port may still delete or overwrite values, which makes readers fail.
    """

    def __init__(self, store: dist.TCPStore, secret: bytes) -> None:
        self._store, self._secret = store, secret

    def set(self, key: str, value: str = "") -> None:
        """Write a value under a key."""
        self._store.set(key, self._code(key, value) + value)

    def get(self, key: str, timeout_s: float) -> str | None:
        """Wait until a key is set, and return its value; return None after `timeout_s`.

        Raises:
            WeightSyncError: the value was written without the secret.
        """
        self._store.set_timeout(timedelta(seconds=timeout_s))
        try:
            text = self._store.get(key).decode(errors="replace")
        except dist.DistStoreError:
            return None
        code, value = text[:_CODE_CHARS], text[_CODE_CHARS:]
        if not hmac.compare_digest(code.encode(), self._code(key, value).encode()):
            raise WeightSyncError(
                f"the message {key!r} in the weight sync's store at {self._store.host}:{self._store.port} is not from "
                f"this run: somebody else writes there; start the run again, where nobody else reaches this address"
            )
        return value

    def is_set(self, key: str) -> bool:
        """Return whether a key is set now; a value that was written without the secret does not count."""
        try:
            return self._store.check([key]) and self.get(key, _READ_S) is not None
        except WeightSyncError:
            return False

    def delete(self, key: str) -> None:
        """Remove a key, after its value has been read."""
        self._store.delete_key(key)

    def _code(self, key: str, value: str) -> str:
        # A key has no zero byte, so that no other key and value have the same text.
        return hmac.new(self._secret, f"{key}\0{value}".encode(), _DIGEST).hexdigest()
