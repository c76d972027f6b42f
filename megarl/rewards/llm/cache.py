"""Keep what models answered in an SQLite file, so that a question is paid for once."""

import hashlib
import json
import sqlite3
from pathlib import Path

from megarl.errors import ConfigError
from megarl.host.writing import dispensable


class AnswerCache:
    """Answers by their requests; several processes may share the file, but one thread this object."""

    def __init__(self, path: Path) -> None:
        """Open or create the file; raise ConfigError if that is impossible."""
        self._what = f"the cache {path}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path, timeout=60.0, isolation_level=None, check_same_thread=False)
            self._db.execute("CREATE TABLE IF NOT EXISTS answers (request TEXT PRIMARY KEY, answer TEXT NOT NULL)")
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"rewards.judges: cannot open the cache {path}: {error}; choose another file") from error

    @staticmethod
    def key(body: object) -> str:
        """Return the key of a request, a hash of its whole body."""
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()

    def get(self, key: str) -> str | None:
        """Return the answer to a request, None if there is none or it cannot be read."""
        with dispensable(self._what, sqlite3.Error, done="used"):
            row = self._db.execute("SELECT answer FROM answers WHERE request = ?", (key,)).fetchone()
            return None if row is None else str(row[0])
        return None

    def put(self, key: str, answer: str) -> None:
        """Keep an answer, if the storage takes it; the first one stays."""
        with dispensable(self._what, sqlite3.Error, done="used"):
            self._db.execute("INSERT OR IGNORE INTO answers VALUES (?, ?)", (key, answer))

    def close(self) -> None:
        """Close the file."""
        self._db.close()
