"""Peak FLOP/s of one device, dense, in bf16, from the data sheets."""

_TFLOPS = {
    "B200": 2250.0,
    "GH200": 989.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "A40": 149.7,
    "A10G": 70.0,
    "V100": 125.0,
    "MI300X": 1307.0,
    "MI250X": 191.5,
}
"""Peak TFLOP/s by a substring of the device's name; the first match counts. MI250X: one of its two
dies.
"""


def peak_flops_of(device: str) -> float | None:
    """Return the peak of a device from its torch.cuda.get_device_name, or None if unknown."""
    matches = (tflops for name, tflops in _TFLOPS.items() if name.lower() in device.lower())
    return next((tflops * 1e12 for tflops in matches), None)
