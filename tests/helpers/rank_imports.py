"""Imports of the server whose forks are the ranks of a `RankPool`, after the environment is set."""
# ruff: noqa: E402, F401

import gc
import os

from megarl.host.device.platform import apply_environment

os.environ["MEGARL_DEVICE"] = "cpu"
apply_environment()

import torch._dynamo
import transformers.modeling_utils
import transformers.models.auto.modeling_auto
import transformers.tokenization_utils_fast

import megarl.parallel.model
import megarl.parallel.worker

# Forks share these objects as long as none of them looks through them for garbage.
gc.collect()
gc.freeze()
