"""Write a GPT whose shards are on several ranks as a folder that transformers loads."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from torchdistpackage import errors
from torchdistpackage.comm import primitives
from torchdistpackage.comm.attendance import expect_all
from torchdistpackage.comm.p2p import receive, send
from torchdistpackage.comm.tpc import resolve_group, tpc
from torchdistpackage.errors import CheckpointError, LayoutError, TorchDistError
from torchdistpackage.layout.derive import blocks, local_shape, owns
from torchdistpackage.models import gpt_layout
from torchdistpackage.models.gpt import GPT
from torchdistpackage.models.hugging_face_config import config_json
from torchdistpackage.models.hugging_face_folder import SHARD_BYTES, check_new, write_folder
from torchdistpackage.models.hugging_face_layout import sources
from torchdistpackage.topology.mesh import Mesh


@torch.no_grad()
def save_weights(
    stages: GPT | Iterable[GPT],
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    like: str | Path | None = None,
) -> Path:
    """Write the model that the ranks hold as a folder that `from_pretrained` of transformers loads.

    All ranks call it, each with its stages of one model, which may be none; the first rank gets
    one parameter at a time and writes. The rest as in `write_folder`.

    dtype: of the files; default that of the parameters.

    Raises:
        TorchDistError: on all ranks what `write_folder` raises on the first, or LayoutError if a
            rank does not hold its whole shards (ZeRO 3), or CommError if other ranks have not
            called it in time.
    """
    nets = [stages] if isinstance(stages, GPT) else list(stages)
    ranks = _RanksOfModel(nets)
    dtype = ranks.dtype if dtype is None else dtype
    made_of = sources(ranks.shape)
    names = iter(made_of)

    def config() -> dict[str, Any]:
        return config_json(ranks.shape, str(dtype).removeprefix("torch."), like)

    def check() -> None:
        check_new(folder)
        config()

    def write() -> None:
        options = {"shard_bytes": shard_bytes, "like": like}
        write_folder(
            folder, config(), made_of, lambda _: ranks.whole(next(names)), dtype, **options
        )

    ranks.raise_all(ranks.try_on_first(check))
    error = ranks.try_on_first(write)
    for name in names:  # of the other ranks all, of the first what is left if it failed
        ranks.whole(name)
    ranks.raise_all(error)
    return Path(folder)


class _RanksOfModel:
    """Collects the whole parameters of a model from the ranks that hold its shards.

    Raises:
        LayoutError: a rank does not hold the whole of its shards.
    """

    def __init__(self, nets: list[GPT]):
        self.held: dict[str, Tensor] = {}
        for net in nets:
            layouts = net.layouts()
            for name, parameter in net.named_parameters():
                self.held.setdefault(layouts[name].name, parameter.detach())
        if tpc.is_set:
            self.mesh, self.group = tpc.topology.dense, resolve_group(None, "global")
        else:
            self.group = nets[0].group
            self.mesh = Mesh(((nets[0].axis, self.group.size()),))
        expect_all("save_weights()", self.group)
        self.ranks, self.rank = primitives.ranks_of(self.group), self.group.rank()
        local_sizes = [(net.shape, net.stage_of, net.axis, _dtype_of(net)) for net in nets]
        all_mine = primitives.gather_objects(local_sizes, self.group)
        first = next(x for entries in all_mine for x in cast(list[Any], entries))
        self.shape, stage_of, axis, self.dtype = first
        self.layouts = gpt_layout.layouts(self.shape, stage_of, axis)
        self._check()

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def try_on_first(self, act: Callable[[], None]) -> TorchDistError | None:
        """Call `act` on the first rank only, and return the error that it raised, or None."""
        try:
            if self.is_first:
                act()
        except TorchDistError as error:
            return error
        return None

    def raise_all(self, error: TorchDistError | None) -> None:
        """Raise the first rank's error on every rank."""
        message = None if error is None else (type(error).__name__, str(error))
        first_message = primitives.broadcast_object(message, self.group)
        if error is not None:
            raise error
        if first_message is not None:
            kind, text = cast(tuple[str, str], first_message)
            raise getattr(errors, kind, CheckpointError)(text)

    def whole(self, name: str) -> Tensor:
        """Return the full parameter on the first rank; the others send their shards and return an
        empty tensor.
        """
        layout = self.layouts[name]
        full = torch.empty(layout.shape, dtype=self.dtype) if self.is_first else torch.empty(0)
        for rank in range(self.mesh.size):
            if not owns(layout, self.mesh, rank):
                continue
            local_tensor = self.held.get(name) if rank == self.rank else None
            if self.is_first and local_tensor is None:
                room = torch.empty(local_shape(layout, self.mesh, rank), dtype=self.dtype)
                local_tensor = receive(self._reachable(room), self.group, self.ranks[rank])
            if self.is_first and local_tensor is not None:
                for where, local in blocks(layout, self.mesh, rank):
                    full[where] = local_tensor[local].to("cpu")
            elif local_tensor is not None:
                send(self._reachable(local_tensor).contiguous(), self.group, self.ranks[0])
        return full

    def _reachable(self, x: Tensor) -> Tensor:
        """Move a tensor to the device that the group's messages need."""
        return x if not self.held else x.to(next(iter(self.held.values())).device)

    def _check(self) -> None:
        problem = None
        for name, parameter in self.held.items():
            expected = local_shape(self.layouts[name], self.mesh, self.rank)
            if tuple(parameter.shape) != expected:
                problem = (
                    f"{name} has shape {tuple(parameter.shape)} on rank {self.rank}, where the "
                    f"model has {expected}; under ZeRO 3 save a checkpoint and use tdp export"
                )
                break
        for reported in primitives.gather_objects(problem, self.group):
            if reported is not None:
                raise LayoutError(str(reported))


def _dtype_of(net: GPT) -> torch.dtype:
    return next((x.dtype for x in net.parameters()), torch.float32)
