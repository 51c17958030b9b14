"""Tells projects, which are imported after this, that their device is the processor: without a GPU, some take one for granted."""

import os

import torch

os.environ["DS_ACCELERATOR"] = "cpu"
torch._utils._get_available_device_type = lambda: "cpu"
