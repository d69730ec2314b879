"""A smoke test of the groups that `tpc` made, on the device that they use.

One rule: every number that comes back is compared with the one that ranks alone predict, and all
ranks learn of any that differs, so that none is left waiting.
"""

import logging
from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import Tensor

from torchdistpackage.comm import primitives
from torchdistpackage.comm.p2p import Post
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import CommError

NUM_ELEMENTS = 1000
_LOG = logging.getLogger(__name__)


def test_comm() -> None:
    """Use each of tpc's groups once: sums, copies, joins, and messages along the pipeline.

    Call it on every rank after `tpc.setup_process_groups`. Rank 0 logs one line at the end.

    Raises:
        CommError: some rank received other data than was sent; names group, operation and ranks,
            on every rank alike. Also when the backend itself fails.
        LaunchError: tpc is not set up.
    """
    modes = [*tpc.topology.dense.names, "model", "global", "moe_dp", "moe_ep"]
    used = [mode for mode in modes if tpc.is_mode_inited(mode)]
    # Members first: ranks that disagree on them would wait for each other below.
    _raise_together([text for mode in used for text in _wrong_members(mode)])
    found = [text for mode in used for text in _wrong_in(mode)]
    _raise_together(found + (_wrong_along_pipe() if "pipe" in used else []))
    if tpc.rank == 0:
        sizes = ", ".join(f"{mode} {tpc.get_group_size(mode)}" for mode in used)
        _LOG.info("all groups deliver what was sent (%s)", sizes or "one rank, none to test")


# its name is the earlier package's, and pytest would take it for a test
test_comm.__test__ = False  # type: ignore[attr-defined]


def _raise_together(found: list[str]) -> None:
    """Raise on all ranks what any of them found."""
    everywhere = cast(list[list[str]], primitives.gather_objects(found))
    problems = [text for texts in everywhere for text in texts]
    if problems:
        shown = "\n  ".join(problems[:8])
        raise CommError(
            f"{len(problems)} checks of tpc's groups failed:\n  {shown}\n"
            f"see whether all ranks set up the same groups in the same order"
        )


def _wrong_members(mode: str) -> Iterator[str]:
    """Whether the group is of other ranks than its name says."""
    members, ranks = list(primitives.ranks_of(tpc.get_group(mode))), tpc.get_ranks_in_group(mode)
    if members != ranks:
        yield f"the {mode} group of ranks {ranks}: rank {tpc.rank} holds that of ranks {members}"


def _wrong_in(mode: str) -> Iterator[str]:
    """What the collectives of one group delivered wrongly."""
    group, ranks = tpc.get_group(mode), tpc.get_ranks_in_group(mode)
    mine = _sent_by(tpc.rank, group)
    checks: list[tuple[str, Callable[[], Tensor], list[int]]] = [
        ("all_reduce", lambda: primitives.all_reduce(mine.clone(), group), [sum(ranks)]),
        ("broadcast", lambda: primitives.broadcast(mine.clone(), group, ranks[0]), ranks[:1]),
        ("all_gather", lambda: primitives.all_gather(mine, group), ranks),
    ]
    for operation, run, codes in checks:
        per_rank = len(ranks) if operation == "all_reduce" else 1
        expected = torch.cat([_data(code, per_rank, mine.device) for code in codes])
        yield from _compared(run(), expected, f"{operation} over the {mode} group of ranks {ranks}")


def _wrong_along_pipe() -> list[str]:
    """What went wrong from each stage to the next, and then back."""
    found: list[str] = []
    group, ranks = tpc.get_group("pipe"), tpc.get_ranks_in_group("pipe")
    index = ranks.index(tpc.rank)
    for step in (1, -1):
        mine = _sent_by(tpc.rank, group)
        post, room = Post(group), torch.zeros_like(mine)
        if 0 <= index - step < len(ranks):
            post.receive([room], ranks[index - step])
        if 0 <= index + step < len(ranks):
            post.send([mine], ranks[index + step])
        post.go().wait()
        if 0 <= index - step < len(ranks):
            source = ranks[index - step]
            where = f"message from rank {source} in the pipe group of ranks {ranks}"
            found += _compared(room, _data(source, 1, mine.device), where)
    return found


def _sent_by(rank: int, group: Group) -> Tensor:
    on_cuda = primitives.is_nccl(group)
    device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
    return _data(rank, 1, device)


def _data(code: int, num_summed: int, device: torch.device) -> Tensor:
    """(NUM_ELEMENTS,) integers that say who sent them, or the sum of `num_summed` such."""
    place = torch.arange(NUM_ELEMENTS, device=device)
    return code * NUM_ELEMENTS + num_summed * place


def _compared(got: Tensor, expected: Tensor, where: str) -> Iterator[str]:
    different = got != expected
    if bool(different.any()):
        at = int(different.int().argmax())
        yield (
            f"{where}: rank {tpc.rank} got {int(got[at])} at element {at}, expected "
            f"{int(expected[at])} ({int(different.sum())} of {len(got)} elements differ)"
        )
