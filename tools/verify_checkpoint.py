"""Compare two checkpoints bit for bit: python tools/verify_checkpoint.py FIRST SECOND"""

from megarl.convert.cli import script

if __name__ == "__main__":
    script("verify")
