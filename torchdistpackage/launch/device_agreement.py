"""Whether all ranks may run on the devices they chose: judged once, from what each published.

A rank without a GPU among ranks with one would wait on gloo for peers that wait in NCCL, and a
whole run on the CPU where GPUs were meant costs a night. So both are refused, with the hosts that
are short of a GPU. One machine with too few GPUs may run on the CPU: that is how people try things.

Pure: what the ranks published is an argument.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Self

_NAMED = 8


@dataclass(frozen=True, slots=True)
class RankDevice:
    """What one rank says of itself before any communicator is made.

    device: "cuda" or "cpu". asked: the backend its caller asked for, or "". num_visible: GPUs the
    driver shows it; hides_gpus: CUDA_VISIBLE_DEVICES is set and names none. num_given: GPUs of
    this node that Slurm gave the step. problem: why it could choose none, or "".
    """

    rank: int
    host: str
    node: int
    num_local: int
    device: str
    backend: str
    asked: str
    num_visible: int
    hides_gpus: bool
    num_given: int
    problem: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        return cls(**json.loads(text))


def disagreement(ranks: Sequence[RankDevice]) -> str:
    """Why these ranks must not begin, or "" if they may."""
    if wrong := [r for r in ranks if r.problem]:
        shown = "; ".join(f"rank {r.rank} on {r.host}: {r.problem}" for r in wrong[:_NAMED])
        return shown + (f"; and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else "")
    on_cpu = [r for r in ranks if r.device == "cpu"]
    if on_cpu and len(on_cpu) < len(ranks):
        return (
            f"some ranks have a GPU and some have none: {_shortage(on_cpu)}; the other "
            f"{len(ranks) - len(on_cpu)} ranks have one each; {_ADVICE}"
        )
    backends = {r.backend: [s.rank for s in ranks if s.backend == r.backend] for r in ranks}
    if len(backends) > 1:
        shown = ", ".join(f"{name} on {_listed(those)}" for name, those in backends.items())
        return f"the ranks use different backends: {shown}; give setup_distributed the same on all"
    if on_cpu and (short := [r for r in ranks if _is_short(r, len(ranks))]):
        return f"too few GPUs: {_shortage(short)}; {_ADVICE}"
    return ""


_ADVICE = (
    "look at `nvidia-smi` there and leave such hosts out (Slurm: --exclude), or set "
    "CUDA_VISIBLE_DEVICES to nothing for all ranks to run on the CPU"
)


def _is_short(r: RankDevice, world_size: int) -> bool:
    """Whether a rank on the CPU was meant to have a GPU."""
    if r.asked == "gloo" or r.hides_gpus:
        return False
    return r.num_given > 0 or (r.num_visible > 0 and r.num_local < world_size)


def _shortage(ranks: Sequence[RankDevice]) -> str:
    """Hosts, how many GPUs each shows, and to how many ranks."""
    nodes = {r.node: [s for s in ranks if s.node == r.node] for r in ranks}
    shown: list[str] = []
    for those in nodes.values():
        r = those[0]
        given = f" of the {r.num_given} that Slurm gave" if r.num_given else ""
        gpus = "no GPU" if not r.num_visible else f"{r.num_visible} GPU{'s' * (r.num_visible > 1)}"
        many = "s" * (r.num_local > 1)
        numbers = _listed([s.rank for s in those])
        shown.append(f"{r.host} shows {gpus}{given} to {r.num_local} rank{many} ({numbers})")
    more = f"; and {len(shown) - _NAMED} more hosts" if len(shown) > _NAMED else ""
    return "; ".join(shown[:_NAMED]) + more


def _listed(ranks: Iterable[int]) -> str:
    """0 to 7, 9: runs of consecutive numbers by their ends."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank])
    shown = ", ".join(" to ".join(map(str, run)) for run in runs)
    return f"rank{'s' * (len(runs) > 1 or len(runs[0]) > 1)} {shown}"
