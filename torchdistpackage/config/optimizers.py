"""The optimizers that `optim.name` offers, one row each. No torch.

The values of the key, the optimizer object, the bytes in `tdp plan`, refused layouts and
checkpoints, and the table of docs/zero.md (scripts/docs) follow from a row.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

MIN_8BIT_SIZE, BLOCK_SIZE = 4096, 256
"""Limits of adamw8bit: fewest elements with 8-bit state, and elements that share a scale."""


@dataclass(frozen=True, slots=True)
class ParameterPart:
    """The elements of one parameter that a rank updates.

    shape: of the parameter. is_table: it is an embedding or a head. is_matrix: it is a matrix or a
    stack of them, and no table. count: number of elements updated here.
    """

    shape: tuple[int, ...]
    is_table: bool
    is_matrix: bool
    count: int


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """One optimizer.

    make: "module:function" that makes it of parameter groups and the optim section.
    state_bytes: bytes that it keeps of a part, where one number has so many.
    takes: the parameters that it updates; AdamW updates the others. `matrices` have two dims;
        neither they nor `blocks` include embeddings and heads.
    leaves_out: it leaves out a step by `found_inf` on the device, as torch's fused kernels do. For
        another one the host reads the flag.
    needs_whole: why it updates an element from others of its parameter; "" if it does not.
    takes_split: it does so also for parameters that tensor and expert ranks split.
    state_keys: keys of its state, at least one of which a checkpoint must have for it to go on;
        () for any.
    package: it comes from this package.
    note, state: its row of docs/zero.md: what follows its name, and its state of a matrix of r rows
        and c columns.
    """

    name: str
    make: str
    state_bytes: Callable[[ParameterPart, int], int]
    takes: Literal["all", "blocks", "matrices"] = "all"
    leaves_out: bool = False
    needs_whole: str = ""
    takes_split: bool = False
    state_keys: tuple[str, ...] = ()
    package: str = ""
    note: str = ""
    state: str = ""

    @property
    def refuses_split(self) -> str:
        """Return why it cannot update parameters that tensor and expert ranks split, or "" if it
        can.
        """
        return "" if self.takes_split else self.needs_whole


def one_number(part: ParameterPart, num_bytes: int) -> int:
    """Return the bytes of a number for each element."""
    return part.count * num_bytes


def two_numbers(part: ParameterPart, num_bytes: int) -> int:
    """Return the bytes of two numbers for each element."""
    return 2 * part.count * num_bytes


def _one_of_matrices(part: ParameterPart, num_bytes: int) -> int:
    """Return the bytes of momentum for a matrix, and of AdamW's two means for anything else."""
    return (1 if part.is_matrix else 2) * part.count * num_bytes


def _rows_and_columns(part: ParameterPart, num_bytes: int) -> int:
    if len(part.shape) < 2:
        return one_number(part, num_bytes)
    return (part.count // part.shape[-1] + part.count // part.shape[-2]) * num_bytes


def _eight_bits(part: ParameterPart, num_bytes: int) -> int:
    if part.is_table:
        return two_numbers(part, num_bytes)
    if part.count < MIN_8BIT_SIZE:
        return 2 * part.count * 4
    return 2 * (part.count + 4 * -(-part.count // BLOCK_SIZE))


_MAKERS = "torchdistpackage.train.optimizers"

OPTIMIZERS: Mapping[str, OptimizerSpec] = {
    spec.name: spec
    for spec in (
        OptimizerSpec(
            "adamw",
            f"{_MAKERS}:adamw",
            two_numbers,
            leaves_out=True,
            state_keys=("exp_avg",),
            note=" (torch, fused)",
            state="2 r c numbers",
        ),
        OptimizerSpec(
            "adamw8bit",
            f"{_MAKERS}:adamw8bit",
            _eight_bits,
            takes="blocks",
            needs_whole="scales its statistics by blocks of a whole parameter",
            state_keys=("state1",),
            package="bitsandbytes",
            note=' (bitsandbytes 0.50: `pip install "torchdistpackage[int8]"`); AdamW of '
            "embeddings and the head",
            state="2 r c bytes and 8 bytes for every 256 elements; in full below 4,096 elements",
        ),
        OptimizerSpec(
            "adafactor",
            f"{_MAKERS}:adafactor",
            _rows_and_columns,
            needs_whole="follows means over whole rows and columns",
            state_keys=("row_var", "variance"),
            note=" (torch's; lr bounds its relative step)",
            state="r + c",
        ),
        OptimizerSpec("sgd", f"{_MAKERS}:sgd", one_number, leaves_out=True, state="r c"),
        OptimizerSpec(
            "muon",
            f"{_MAKERS}:muon",
            _one_of_matrices,
            takes="matrices",
            needs_whole="makes the update of a whole matrix orthogonal",
            takes_split=True,
            note=", of matrices, each expert's and each of q, k and v by itself; AdamW of "
            "embeddings, the head and vectors",
            state="r c",
        ),
    )
}

OWN = OptimizerSpec(
    "target",
    f"{_MAKERS}:from_user",
    two_numbers,  # as AdamW, because nobody knows before it has stepped
    needs_whole="may update an element from others of its parameter",
)
"""Row for `optim.target`: the class is only known to be an optimizer."""


def page_rows() -> str:
    """Return the table of docs/zero.md."""
    head = "| `optim.name` | state of a matrix of r rows and c columns | layouts |\n|---|---|---|\n"
    return head + "".join(
        f"| `{x.name}`{x.note} | {x.state} | "
        f"{'not `tensor` and `expert`' if x.refuses_split else 'all'} |\n"
        for x in OPTIMIZERS.values()
    )
