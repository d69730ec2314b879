"""What both sides of the fault benchmark train on, and the one sample that cannot be read.

One rule: a batch is a function of step and place, so both sides compute the same amount on the same
tokens; `broken` fails whenever it is asked for, as a bad file on a disk does.
"""

import json
import os
import socket
import time
from pathlib import Path

import torch
from torch import Tensor

BROKEN = "sample 4711 cannot be read"


class Tokens:
    """Random ids. The data index `broken` raises at `broken_step` and notes when, where and who."""

    def __init__(
        self, seq_len: int, vocab: int, broken: int = -1, broken_step: int = -1, note: str = ""
    ):
        self.seq_len, self.vocab, self.note = seq_len, vocab, note
        self.broken = (broken, broken_step)

    def batch(self, split, seed, step, data_index, num_data, per_rank, *, first=0):
        if (data_index, step) == self.broken and split == "train":
            path = Path(self.note)
            if not path.exists():
                rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", -1)))
                said = {"time_s": time.time(), "host": socket.gethostname(), "rank": rank}
                path.with_suffix(".tmp").write_text(json.dumps(said))
                path.with_suffix(".tmp").replace(path)
            raise ValueError(BROKEN)
        draw = torch.Generator().manual_seed(seed + (step * num_data + data_index) * 1009 + first)
        ids: Tensor = torch.randint(self.vocab, (per_rank, self.seq_len + 1), generator=draw)
        return ids[:, :-1], ids[:, 1:].clone()
