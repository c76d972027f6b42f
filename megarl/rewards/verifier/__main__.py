"""The fork server of a pool."""

import sys

from megarl.rewards.verifier.fork_server import main

main(sys.argv[1:])
