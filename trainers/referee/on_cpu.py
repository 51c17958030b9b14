"""Tells torchtitan, which is imported after this, that its device is the processor: without a GPU it takes one for granted."""

import torch

torch._utils._get_available_device_type = lambda: "cpu"
