"""What ranks do with a transformers folder. Nothing here imports transformers, which takes them
seconds."""

from pathlib import Path
from unittest.mock import patch

import torch
from safetensors import safe_open
from torch import Tensor

from tests.train import parity
from torchdistpackage.comm.p2p import receive, send
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import CheckpointError
from torchdistpackage.layout.derive import even_share
from torchdistpackage.models import gpt_layout
from torchdistpackage.models.gpt import GPT
from torchdistpackage.models.hugging_face import from_pretrained
from torchdistpackage.models.hugging_face_export import save_weights
from torchdistpackage.train.train_state import TrainState, save_state

VOCAB, SEQ_LEN, BATCH = 261, 8, 3
CLOSE = {"rtol": 1e-9, "atol": 1e-9}

START = (
    *("data.seq_len=8", "data.global_batch=4", "pipeline.microbatches=2", "train.steps=5"),
    *("precision.dtype=float64", "optim.warmup_steps=0", "parallel.data=1"),
)
"""Of a run on bytes."""


def ids() -> Tensor:
    draw = torch.Generator().manual_seed(5)
    return torch.randint(VOCAB, (BATCH, SEQ_LEN + 1), generator=draw)


def stage(world, folder: str, dtype: torch.dtype = torch.float64, **options) -> GPT:
    """My stage of the model."""
    tpc.setup_process_groups(list(world))
    size = dict(world).get("pipe", 1)
    whole = from_pretrained(folder, device="meta").shape if size > 1 else None
    pieces, stage_of = None, None
    if whole is not None:
        half = len(gpt_layout.pieces(whole)) // size
        pieces = range(half * tpc.get_pp_rank(), half * (tpc.get_pp_rank() + 1))
        stage_of = [index // half for index in range(half * size)]
    return from_pretrained(folder, pieces=pieces, stage_of=stage_of, dtype=dtype, **options)


def check_logits(world, folder: str, expected: Tensor, sequence_parallel: bool) -> None:
    net = stage(world, folder, seq_len=SEQ_LEN, sequence_parallel=sequence_parallel)
    pipe, group = dict(world).get("pipe", 1), net.group
    ranks, place = tpc.get_ranks_in_group("pipe") if pipe > 1 else (), tpc.get_pp_rank()
    x = ids()[:, :-1]
    if place > 0:
        rows = SEQ_LEN // (group.size() if sequence_parallel else 1)
        room = torch.empty(rows, BATCH, net.shape.dim, dtype=torch.float64)
        x = receive(room, tpc.get_group("pipe"), ranks[place - 1])
    y = net(x)
    if place < pipe - 1:
        send(y.detach(), tpc.get_group("pipe"), ranks[place + 1])
        return
    start, width = even_share(net.shape.vocab, group.size(), group.rank())
    torch.testing.assert_close(y, expected[..., start : start + width], **CLOSE)


def rewrite(world, folder: str, target: str, held: torch.dtype, **how) -> None:
    """Read a folder into the ranks of a world, and write it anew."""
    save_weights(stage(world, folder, held), target, **how)


def first_step(changes: list[str]) -> tuple[float, Tensor, Tensor]:
    """Mean loss of the first step of a run on bytes, and its batch."""
    run = parity.trainer(changes)
    section = run.plan.config.data
    batch = run.data.batch("train", run.seed, 1, 0, 1, section.global_batch)
    return run.train_step(1).wait().loss, *batch


def refusal(folder: str) -> str:
    """What a folder with other weights is answered with."""
    try:
        stage((("tensor", 2),), folder)
    except CheckpointError as error:
        return str(error)
    return ""


def save_run(changes: list[str]) -> None:
    """A run folder with a checkpoint of the state that a run begins with."""
    run = parity.trainer([*START, *changes])
    config = run.plan.config
    for name, parameter in run.stage.named_parameters():
        if name.endswith(("lora_A.default.weight", "lora_B.default.weight")):
            # not zero, as B begins; the same bits wherever a part of it is
            torch.nn.init.constant_(parameter, 0.25 if "_A" in name else 0.5)
    folder = Path(config.run.dir) / config.run.name
    save_state(run, TrainState(step=1), folder, keep_last=1)
    if run.rank == 0:
        (folder / "resolved.yaml").write_text(config.to_yaml())


def elements_read(world, folder: str) -> tuple[int, int]:
    """(elements read out of the files, elements that this rank holds)."""
    read = 0

    class Counting:
        def __init__(self, part):
            self.part = part

        def __getitem__(self, where):
            nonlocal read
            found = self.part[where]
            read += found.numel()
            return found

    class Opened:
        """A file of which nothing but slices can be read."""

        def __init__(self, *args, **kwargs):
            self.file = safe_open(*args, **kwargs)

        def __enter__(self):
            self.file.__enter__()
            return self

        def __exit__(self, *error):
            self.file.__exit__(*error)

        def get_slice(self, key):
            return Counting(self.file.get_slice(key))

    with patch("torchdistpackage.models.hugging_face_folder.safe_open", Opened):
        net = stage(world, folder)
    return read, sum(parameter.numel() for parameter in net.parameters())
