"""Run reward functions from users' Python files, whatever library they were written for, in worker processes."""

from megarl.rewards.custom.functions import CustomFunctions, CustomSession
from megarl.rewards.custom.signatures import load_function, signature_of
from megarl.rewards.custom.trial import try_functions

__all__ = ["CustomFunctions", "CustomSession", "load_function", "signature_of", "try_functions"]
