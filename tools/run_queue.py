"""Run a study as `megarl study` does: megarl study STUDY.yaml [--check]"""

import sys

from megarl.cli import main

if __name__ == "__main__":
    main(["study", *sys.argv[1:]])
