"""Compare the log-prob head with its peers, side by side in one run:

    python -m megarl_lab.bench.logprobs --out DIR
    python -m megarl_lab.bench.logprobs --device cuda --out DIR

Prints tables and limits, writes records.json and memory.png into DIR; exits with 1 if a limit is exceeded.
"""

from megarl_lab.bench.logprobs.command import main

if __name__ == "__main__":
    main()
