"""The accelerators for which a step time can be predicted: one table, each number with its source.

Peaks are those of dense matmuls (no sparsity), in FLOP/s; bandwidths are bytes per second in one
direction. The rule: what a vendor prints stands in the table, and what was fitted on published
steps stands in `Fit`, at most three numbers a device. A device without a fit borrows that of the
nearest fitted one; whether a published step checks it says `is_checked` of published.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torchdistpackage.errors import ConfigError

TERA, GIGA = 1e12, 1e9
GBIT = 1e9 / 8
"""Bytes per second of a network card of 1 Gbit/s."""


@dataclass(frozen=True, slots=True)
class Fit:
    """The constants of a device that its data sheet does not print.

    matmul: share of the peak that large bfloat16 matmuls reach. memory: share of the memory
    bandwidth that element-wise kernels reach. link: share of the bandwidth of links inside a node
    that large collectives reach, measured or assumed. float8: share of its peak that float8
    reaches, always borrowed; None: as `matmul`.
    """

    matmul: float
    memory: float
    link: float
    float8: float | None = None

    def of_matmul(self, dtype: str) -> float:
        """Return the share of the peak in this dtype that large matmuls reach."""
        return self.float8 if dtype == "float8" and self.float8 is not None else self.matmul


_FLASH3 = (0.66, 0.55)
"""About the share of the peak that attention written for Hopper reaches, there and back, on long
sequences, heads 128 wide, causal (Shah et al. 2024, arXiv:2407.08608, figures of throughput)."""


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One kind of device and the node that its vendor builds around it.

    peaks: FLOP/s of dense matmuls by dtype. memory_bytes_per_s, memory_bytes: of the device's
    memory. node_bytes_per_s: to the other devices of its node, one direction. node_size: devices
    that these links join. network_bytes_per_s: of the network card of one device. cores: streaming
    multiprocessors or compute units, over which a matmul's tiles are spread. flash2: share of the
    bfloat16 peak that FlashAttention 2 reaches on long sequences, there and back; flash3: the same
    of kernels made for the device. half_length: tokens of a sequence at which attention reaches
    half of that; 0: its rate depends on its tiles, which start in their order and not the longest
    first. clock: what its power limit leaves
    of the rate of a device with the same printed peaks. matmul_times: by dtype (operations,
    seconds) of measured matmuls, ascending, in place of peak and cores. call_s: host time of an
    operation where it was measured. is_host: the host computes, so its calls and its communication
    take the time of computations. activation_s, attention_s: measured seconds for a number of an
    activation with its bytes, and for an operation of attention, there and back.
    """

    name: str
    title: str
    peaks: Mapping[str, float]
    memory_bytes_per_s: float
    memory_bytes: float
    node_bytes_per_s: float
    node_size: int
    network_bytes_per_s: float
    cores: int
    fit: Fit
    is_fitted: bool
    source: str
    flash2: tuple[float, float] = (0.36, 0.32)
    flash3: tuple[float, float] = _FLASH3
    half_length: int = 512
    clock: float = 1.0
    matmul_times: Mapping[str, tuple[tuple[float, float], ...]] = field(
        default_factory=dict[str, tuple[tuple[float, float], ...]]
    )
    call_s: float | None = None
    is_host: bool = False
    activation_s: tuple[float, float] | None = None
    attention_s: tuple[float, float] | None = None

    def peak(self, dtype: str) -> float:
        """Return the FLOP/s of matmuls in this dtype; float8 is bfloat16 where there is none."""
        return self.peaks.get(dtype, self.peaks["bfloat16"])


# What `scripts/prediction_table.py --fit NAME` prints, which a test holds them to.
_A100 = Fit(matmul=0.84, memory=0.70, link=0.75)
_H100 = Fit(matmul=0.60, memory=0.90, link=0.75)
_B200 = Fit(matmul=0.46, memory=0.70, link=0.67, float8=_H100.matmul)
_MI300X = Fit(matmul=0.45, memory=0.81, link=0.75)
"""Measured by others: the share of the peak that matmuls in bfloat16 and float8 reach, as power
limits their clocks, and that of the memory's bandwidth (Ambati et al. 2025, arXiv:2510.27583)."""

_FLASH2_ON_AMPERE = (0.62, 0.55)
_FLASH2_ON_BLACKWELL = (0.16, 0.14)
"""FlashAttention 2 is written with Ampere's instructions, which Hopper and Blackwell run at about
one rate: Dao 2023, arXiv:2307.08691, figures of throughput on A100 and H100."""
_CUDNN_ON_BLACKWELL = (0.58, 0.40)
"""The share of the peak where tiles outnumber the cores: the mean over 13 sizes of kernels that
MooreThreads/SimuMax measured on a B200 (configs/system/b200_bf16_ceperm.json, whose rates count
masked scores), of 4,096 to 131,072 tokens and 4 to 128 heads 128 wide; each is within 20 % of it,
two forward ones within 35 %."""

_FLASH2_ON_CDNA = (0.27, 0.155)
"""FlashAttention 2 of ROCm 6.3.2 on MI300X: 355 and 203 TFLOP/s on 16,384 tokens, heads 128 wide
(ROCm/flash-attention#142), where PyTorch's own kernels are said to be about as fast."""
_AITER_ON_CDNA = (0.36, 0.32)
"""Those of FlashAttention 2 on Hopper, for want of a table; AITER's backward was measured at 0.30
and 0.42 of the peak of an MI355X (ROCm/aiter#815)."""


def _at_power(watts: float, of_watts: float) -> float:
    """Return the fraction of a rate that remains under a power limit.

    Clocks follow about the cube root of the power (P ~ f V^2, V ~ f), of which some 150 W do not
    depend on the clock."""
    return ((watts - 150) / (of_watts - 150)) ** (1 / 3)


DEVICES: dict[str, Accelerator] = {
    each.name: each
    for each in (
        # NVIDIA A100 80GB data sheet (SXM): 312 TFLOPS BF16, 156 TF32, 19.5 FP32, 2,039 GB/s,
        # NVLink 600 GB/s both ways; DGX A100 data sheet: eight 200 Gbit/s cards; 108 SMs: A100
        # white paper.
        Accelerator(
            name="a100",
            title="A100 80 GB SXM",
            peaks={"bfloat16": 312 * TERA, "tfloat32": 156 * TERA, "float32": 19.5 * TERA},
            memory_bytes_per_s=2039 * GIGA,
            memory_bytes=80 * GIGA,
            node_bytes_per_s=300 * GIGA,
            node_size=8,
            network_bytes_per_s=200 * GBIT,
            cores=108,
            fit=_A100,
            is_fitted=True,
            source="NVIDIA A100 data sheet; DGX A100 data sheet",
            flash2=_FLASH2_ON_AMPERE,
        ),
        # NVIDIA H100 data sheet (SXM, sparse rates halved): 989.4 BF16, 1,978.9 FP8, 3.35 TB/s,
        # NVLink 900 GB/s both ways; DGX H100: eight 400 Gbit/s cards; 132 SMs: Hopper white paper.
        Accelerator(
            name="h100-sxm",
            title="H100 SXM",
            peaks={
                "float8": 1978.9 * TERA,
                "bfloat16": 989.4 * TERA,
                "tfloat32": 494.7 * TERA,
                "float32": 67 * TERA,
            },
            memory_bytes_per_s=3350 * GIGA,
            memory_bytes=80 * GIGA,
            node_bytes_per_s=450 * GIGA,
            node_size=8,
            network_bytes_per_s=400 * GBIT,
            cores=132,
            fit=_H100,
            is_fitted=True,
            source="NVIDIA H100 data sheet; DGX H100 data sheet",
        ),
        # torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: 96 GB HBM2e at 2.4 TB/s and a
        # limit of 500 W instead of 700.
        Accelerator(
            name="h100-500w",
            title="H100 SXM at 500 W, HBM2e",
            peaks={
                "float8": 1978.9 * TERA,
                "bfloat16": 989.4 * TERA,
                "tfloat32": 494.7 * TERA,
                "float32": 67 * TERA,
            },
            memory_bytes_per_s=2400 * GIGA,
            memory_bytes=96 * GIGA,
            node_bytes_per_s=450 * GIGA,
            node_size=8,
            network_bytes_per_s=400 * GBIT,
            cores=132,
            fit=_H100,
            is_fitted=False,
            source="pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md",
            clock=_at_power(500, 700),
        ),
        # NVIDIA H100 PCIe product brief PB-11133: 756 BF16, 1,513 FP8, 2,000 GB/s; 114 SMs. Pairs
        # have a bridge; a group of more goes through PCIe 5.0 x16, 64 GB/s each way.
        Accelerator(
            name="h100-pcie",
            title="H100 PCIe",
            peaks={
                "float8": 1513 * TERA,
                "bfloat16": 756 * TERA,
                "tfloat32": 378 * TERA,
                "float32": 51 * TERA,
            },
            memory_bytes_per_s=2000 * GIGA,
            memory_bytes=80 * GIGA,
            node_bytes_per_s=64 * GIGA,
            node_size=8,
            network_bytes_per_s=400 * GBIT,
            cores=114,
            fit=_H100,
            is_fitted=False,
            source="NVIDIA H100 PCIe product brief PB-11133",
        ),
        # NVIDIA H200 data sheet (SXM): the rates of H100 SXM with 141 GB at 4.8 TB/s.
        Accelerator(
            name="h200",
            title="H200 SXM",
            peaks={
                "float8": 1978.9 * TERA,
                "bfloat16": 989.4 * TERA,
                "tfloat32": 494.7 * TERA,
                "float32": 67 * TERA,
            },
            memory_bytes_per_s=4800 * GIGA,
            memory_bytes=141 * GIGA,
            node_bytes_per_s=450 * GIGA,
            node_size=8,
            network_bytes_per_s=400 * GBIT,
            cores=132,
            fit=_H100,
            is_fitted=False,
            source="NVIDIA H200 data sheet",
        ),
        # DGX B200 data sheet, one of eight: 72 PFLOPS FP8 and 36 BF16 are sparse; 64 TB/s, 1,440
        # GB, NVLink 1.8 TB/s both ways, eight 400 Gbit/s cards; 148 SMs: cudaDeviceProp.
        Accelerator(
            name="b200",
            title="B200",
            peaks={
                "float8": 4500 * TERA,
                "bfloat16": 2250 * TERA,
                "tfloat32": 1125 * TERA,
                "float32": 75 * TERA,
            },
            memory_bytes_per_s=8000 * GIGA,
            memory_bytes=180 * GIGA,
            node_bytes_per_s=900 * GIGA,
            node_size=8,
            network_bytes_per_s=400 * GBIT,
            cores=148,
            fit=_B200,
            is_fitted=True,
            source="NVIDIA DGX B200 data sheet",
            flash2=_FLASH2_ON_BLACKWELL,
            flash3=_CUDNN_ON_BLACKWELL,
            half_length=0,
        ),
        # DGX B300 data sheet, one of eight: 72 PFLOPS FP8 sparse, 64 TB/s, 2.3 TB, NVLink 1.8 TB/s
        # both ways, eight 800 Gbit/s cards.
        Accelerator(
            name="b300",
            title="B300",
            peaks={
                "float8": 4500 * TERA,
                "bfloat16": 2250 * TERA,
                "tfloat32": 1125 * TERA,
                "float32": 75 * TERA,
            },
            memory_bytes_per_s=8000 * GIGA,
            memory_bytes=288 * GIGA,
            node_bytes_per_s=900 * GIGA,
            node_size=8,
            network_bytes_per_s=800 * GBIT,
            cores=148,
            fit=_B200,
            is_fitted=False,
            source="NVIDIA DGX B300 data sheet",
            flash2=_FLASH2_ON_BLACKWELL,
            flash3=_CUDNN_ON_BLACKWELL,
            half_length=0,
        ),
        # GB200 NVL72 data sheet, one of 72: 720 PFLOPS FP8 and 360 BF16 are sparse; 576 TB/s, 13.4
        # TB, NVLink 130 TB/s both ways among all 72; one 400 Gbit/s card each.
        Accelerator(
            name="gb200",
            title="GB200 NVL72",
            peaks={
                "float8": 5000 * TERA,
                "bfloat16": 2500 * TERA,
                "tfloat32": 1250 * TERA,
                "float32": 80 * TERA,
            },
            memory_bytes_per_s=8000 * GIGA,
            memory_bytes=186 * GIGA,
            node_bytes_per_s=900 * GIGA,
            node_size=72,
            network_bytes_per_s=400 * GBIT,
            cores=148,
            fit=_B200,
            is_fitted=False,
            source="NVIDIA GB200 NVL72 data sheet",
            flash2=_FLASH2_ON_BLACKWELL,
            flash3=_CUDNN_ON_BLACKWELL,
            half_length=0,
        ),
        # GB300 NVL72 data sheet, one of 72: 720 PFLOPS FP8 and 360 BF16 are sparse; 576 TB/s, 20
        # TB, NVLink 130 TB/s both ways; one 800 Gbit/s card each. It has the peaks of GB200 and
        # 1,400 W instead of 1,200.
        Accelerator(
            name="gb300",
            title="GB300 NVL72",
            peaks={
                "float8": 5000 * TERA,
                "bfloat16": 2500 * TERA,
                "tfloat32": 1250 * TERA,
                "float32": 80 * TERA,
            },
            memory_bytes_per_s=8000 * GIGA,
            memory_bytes=279 * GIGA,
            node_bytes_per_s=900 * GIGA,
            node_size=72,
            network_bytes_per_s=800 * GBIT,
            cores=148,
            fit=_B200,
            is_fitted=False,
            source="NVIDIA GB300 NVL72 data sheet",
            flash2=_FLASH2_ON_BLACKWELL,
            flash3=_CUDNN_ON_BLACKWELL,
            half_length=0,
            clock=_at_power(1400, 1200),
        ),
        # AMD Instinct MI300X data sheet: 1,307.4 BF16, 2,614.9 FP8, 5.3 TB/s, 192 GB, 304 compute
        # units; seven links of 64 GB/s each way join eight of them.
        Accelerator(
            name="mi300x",
            title="MI300X",
            peaks={
                "float8": 2614.9 * TERA,
                "bfloat16": 1307.4 * TERA,
                "tfloat32": 653.7 * TERA,
                "float32": 163.4 * TERA,
            },
            memory_bytes_per_s=5300 * GIGA,
            memory_bytes=192 * GIGA,
            node_bytes_per_s=448 * GIGA,
            node_size=8,
            network_bytes_per_s=400 * GBIT,
            cores=304,
            fit=_MI300X,
            flash2=_FLASH2_ON_CDNA,
            flash3=_AITER_ON_CDNA,
            is_fitted=False,
            source="AMD Instinct MI300X data sheet",
        ),
        # AMD Instinct MI325X data sheet: the rates of MI300X with 256 GB at 6 TB/s, and 1,000 W
        # instead of 750.
        Accelerator(
            name="mi325x",
            title="MI325X",
            peaks={
                "float8": 2614.9 * TERA,
                "bfloat16": 1307.4 * TERA,
                "tfloat32": 653.7 * TERA,
                "float32": 163.4 * TERA,
            },
            memory_bytes_per_s=6000 * GIGA,
            memory_bytes=256 * GIGA,
            node_bytes_per_s=448 * GIGA,
            node_size=8,
            network_bytes_per_s=400 * GBIT,
            cores=304,
            fit=_MI300X,
            flash2=_FLASH2_ON_CDNA,
            flash3=_AITER_ON_CDNA,
            is_fitted=False,
            source="AMD Instinct MI325X data sheet",
            clock=_at_power(1000, 750),
        ),
        # AMD Instinct MI355X data sheet: 2,516.6 BF16, 5,033.2 FP8, 8 TB/s, 288 GB, 256 compute
        # units; seven links of 76.8 GB/s each way. It has no TF32: float32 on the matrix cores is
        # 157.3.
        Accelerator(
            name="mi355x",
            title="MI355X",
            peaks={
                "float8": 5033.2 * TERA,
                "bfloat16": 2516.6 * TERA,
                "tfloat32": 157.3 * TERA,
                "float32": 157.3 * TERA,
            },
            memory_bytes_per_s=8000 * GIGA,
            memory_bytes=288 * GIGA,
            node_bytes_per_s=537.6 * GIGA,
            node_size=8,
            network_bytes_per_s=400 * GBIT,
            cores=256,
            fit=_H100,
            flash2=_FLASH2_ON_CDNA,
            flash3=_AITER_ON_CDNA,
            is_fitted=False,
            source="AMD Instinct MI355X data sheet",
        ),
    )
}

OTHER_NAMES = {
    "h100": "h100-sxm",
    "h100-80gb-hbm3": "h100-sxm",
    "a100-80gb": "a100",
    "a100-sxm": "a100",
    "a100-sxm4-80gb": "a100",
    "h200-sxm": "h200",
}
"""Names that clusters give to devices, as in `gres: gpu:h100:8`, and drivers, as in `NVIDIA H100
80GB HBM3`."""


def named_device(name: str) -> Accelerator | None:
    """Return the device of this name, as spelled by Slurm's files or its driver, or None."""
    plain = name.lower().replace("_", "-").replace(" ", "-")
    for maker in ("nvidia-", "amd-", "instinct-"):
        plain = plain.removeprefix(maker)
    return DEVICES.get(OTHER_NAMES.get(plain, plain))


def find_device(name: str) -> Accelerator:
    """Return the device of this name.

    Raises:
        ConfigError: there is none; lists the names.
    """
    if (device := named_device(name)) is None:
        raise ConfigError(f"no device {name[:40]!r} is known; name one of {', '.join(DEVICES)}")
    return device
