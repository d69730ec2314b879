"""An encoder and a decoder over four stages: an image of a digit is spelled, letter by letter.

    python examples/encoder_decoder.py                              four stages on this machine
    torchrun --nproc-per-node 4 examples/encoder_decoder.py

The encoder's memory is a skip: it passes the stage that does not name it, and goes to the two that
do. Prints how many names of digits that no step has seen come out right to the last letter.
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from torchdistpackage import Pipeline, run_or_launch, setup_distributed, tpc

NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
LAYER = {"d_model": 32, "nhead": 4, "dim_feedforward": 64, "dropout": 0.0, "batch_first": True}
CAUSAL = nn.Transformer.generate_square_subsequent_mask(6)


class Encoder(nn.Sequential):
    def forward(self, rows: Tensor) -> dict[str, Tensor]:
        return {"memory": super().forward(rows)}


class Letters(nn.Module):
    def __init__(self):
        super().__init__()
        self.letter, self.place = nn.Embedding(123, 32), nn.Parameter(torch.randn(6, 32))
        self.layer = nn.TransformerEncoderLayer(**LAYER)

    def forward(self, letters: Tensor) -> Tensor:
        return self.layer(self.letter(letters) + self.place, CAUSAL.to(letters.device))


class Decoder(nn.Module):
    def __init__(self, after: nn.Module):
        super().__init__()
        self.layer, self.after = nn.TransformerDecoderLayer(**LAYER), after

    def forward(self, h: Tensor, memory: Tensor) -> Tensor:
        return self.after(self.layer(h, memory, CAUSAL.to(h.device)))


def train() -> None:
    setup_distributed()
    tpc.setup_process_groups([("pipe", 4)])
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    data = load_digits()
    rows = torch.tensor(data.images / 16, dtype=torch.float32, device=device)
    rows = torch.cat([rows, torch.eye(8, device=device).expand_as(rows)], 2)  # and which row it is
    names = [list(NAMES[digit].ljust(6).encode()) for digit in data.target]
    spelled = torch.tensor(names, device=device)
    before = F.pad(spelled[:, :-1], (1, 0))  # each letter is told those before it

    torch.manual_seed(0)
    encoder = Encoder(nn.Linear(16, 32), nn.TransformerEncoderLayer(**LAYER))
    stages = [encoder, Letters(), Decoder(nn.Identity()), Decoder(nn.Linear(32, 123))]
    stage = stages[tpc.get_pp_rank()].to(device)
    loss = lambda logits, names: F.cross_entropy(logits.flatten(0, 1), names.flatten())  # noqa: E731
    pipe = Pipeline(stage, loss=loss, num_microbatches=4, skips=["memory"])
    optimizer = torch.optim.AdamW(stage.parameters(), lr=5e-3)
    known = torch.arange(len(rows))[torch.arange(len(rows)) % 5 != 0]
    draw = torch.Generator().manual_seed(0)  # the same on all ranks
    for _ in range(150):
        batch = known[torch.randint(len(known), (128,), generator=draw)].to(device)
        optimizer.zero_grad()
        pipe.step(rows[batch], letters=before[batch], targets=spelled[batch])
        optimizer.step()

    logits = pipe.predict(rows[::5], letters=before[::5])  # where the last stage is
    told = [None if logits is None else (logits.argmax(2) == spelled[::5]).all(1).double().mean()]
    dist.broadcast_object_list(told, src=3)
    if dist.get_rank() == 0:
        print(f"{told[0]:.4f} of {len(rows[::5])} held-out digits are spelled right")
    dist.destroy_process_group()


if __name__ == "__main__":
    run_or_launch(train, num_procs=4, preload=["sklearn.datasets"])
