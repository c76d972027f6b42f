"""Read the key of a reward service, which server and clients take from an environment variable."""

import os

from megarl.errors import ConfigError

# Shorter ones could be guessed.
MIN_CHARS = 16


def read_service_key(variable: str, *, setting: str) -> str:
    """Return the key in an environment variable that `setting` names. ConfigError if it is unset, short or no text that
    a header can carry, without showing it.
    """
    key = os.environ.get(variable, "")
    if len(key) < MIN_CHARS or not (key.isascii() and key.isprintable()) or " " in key:
        got = f"{len(key)} characters" if key else "nothing"
        raise ConfigError(
            f"{setting}: the environment variable {variable} holds {got}, expected a key of at least {MIN_CHARS} "
            f"printable ASCII characters without spaces; make one with: openssl rand -hex 32"
        )
    return key
