"""How pytest-xdist's workers share out the tests."""

from xdist.scheduler import LoadFileScheduling


class FilesAndRuns(LoadFileScheduling):
    """By file. Runs of the whole program, which need all that there is, go one after the other."""

    def _split_scope(self, nodeid: str) -> str:
        return "e2e" if "tests/e2e/" in nodeid else super()._split_scope(nodeid)
