"""Find directories for temporary files in which no other user can put anything in place of this one's."""

import contextlib
import os
import stat
from pathlib import Path

USUAL = (Path("/tmp"), Path("/var/tmp"))


def candidates() -> tuple[Path, ...]:
    """Return the directories for temporary files, the preferred one first."""
    given = [Path(os.path.abspath(os.environ["TMPDIR"]))] if os.environ.get("TMPDIR") else []
    return tuple(dict.fromkeys([*given, *USUAL]))


def loose_place(root: Path) -> Path | None:
    """Find a directory, `root` or one above it, whose entries another user can rename; None if there is none."""
    # Whoever has this one administers the machine, under whatever number a container shows it.
    trusted = {os.geteuid(), os.stat("/").st_uid}
    for place in dict.fromkeys(above for path in (root, root.resolve()) for above in (path, *path.parents)):
        with contextlib.suppress(OSError):
            found = place.stat()
            shared = stat.S_IMODE(found.st_mode) & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX
            if shared or not {found.st_uid, place.lstat().st_uid} <= trusted:
                return place
    return None
