"""A module to preload that touches the GPU as it is imported, as TDP_BENCHMARK_TOUCH says."""

import ctypes
import os

import torch

WAYS = ("nothing", "is_available", "device_count", "cuInit", "tensor")
"""From harmless to what no fork survives."""
VARIABLE = "TDP_BENCHMARK_TOUCH"


def touch(way: str) -> None:
    match way:
        case "is_available":
            torch.cuda.is_available()
        case "device_count":
            torch.cuda.device_count()
        case "cuInit" if torch.cuda.is_available():
            ctypes.CDLL("libcuda.so.1").cuInit(0)
        case "tensor" if torch.cuda.is_available():
            torch.zeros(1, device="cuda")


touch(os.environ.get(VARIABLE, WAYS[0]))
