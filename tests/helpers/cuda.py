"""What the GPU tests need of the machine, and why they are skipped where it is missing."""

import pytest
import torch


def missing_devices(num_devices: int) -> str:
    """Why there are not as many CUDA devices; "" if there are."""
    found = torch.cuda.device_count()
    if found >= num_devices:
        return ""
    if torch.version.cuda is None:
        return f"needs a CUDA device, and torch {torch.__version__} is a build without CUDA"
    return f"needs {num_devices} CUDA device(s), and there are {found}"


def needs_devices(num_devices: int) -> pytest.MarkDecorator:
    """Skips a test where there are fewer."""
    reason = missing_devices(num_devices)
    return pytest.mark.skipif(bool(reason), reason=reason)
