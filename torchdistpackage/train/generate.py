"""Text from the parallel model: one token after another through all stages and shards."""

import torch
import torch.nn.functional as F
from torch import Tensor

from torchdistpackage.comm import primitives
from torchdistpackage.comm.messages import Message
from torchdistpackage.comm.random import seed_from
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.parallel.pipeline.executor import Executor
from torchdistpackage.schedule.generators.registry import evaluation
from torchdistpackage.train.step import Trainer


def generate(
    trainer: Trainer, prompt: Tensor, num_tokens: int, *, temperature: float = 0.8
) -> Tensor:
    """Continue `prompt` (n,) int64 by `num_tokens` sampled ones; the whole (n + num_tokens,).

    All ranks of one model call it alike and return the same. The context is cut to the model's
    seq_len and always passed at that length: the attention is causal, so padding behind
    the last token changes nothing.
    """
    shape = trainer.plan.shape
    assert shape is not None, "generation needs one of our language models"
    pipe, group = tpc.get_group("pipe"), tpc.get_group("tensor")
    model = tpc.get_group("model")
    executor = Executor(
        evaluation(trainer.plan.schedule, 1),
        pipe,
        device=trainer.device,
        timeout_s=trainer.executor.timeout_s,
    )
    # the ranks of the last stage all know the token; the first of them in the model tells it
    mesh = trainer.plan.topology.dense
    source = mesh.rank(
        mesh.coord(trainer.rank)
        | {"pipe": trainer.plan.schedule.placement[-1], "tensor": 0, "context": 0}
    )
    draw = torch.Generator().manual_seed(seed_from(trainer.seed, "generate"))
    tokens = prompt.to(trainer.device)
    trainer.stage.eval()
    for _ in range(num_tokens):
        context = tokens[-shape.seq_len :]
        padded = F.pad(context, (0, shape.seq_len - len(context)))[None]
        choice = torch.zeros(1, dtype=torch.int64, device=trainer.device)

        def forward(
            stage: int, m: int, received: Message, context=context, padded=padded, choice=choice
        ):
            x = padded if executor.is_first_stage(stage) else received
            output = trainer.forward(stage, x)
            if executor.is_last_stage(stage):
                logits = _whole(output[len(context) - 1, 0], group, shape.vocab)
                chances = (logits.float().cpu() / temperature).softmax(-1)
                choice.copy_(torch.multinomial(chances, 1, generator=draw))
            return output

        executor.run(forward)
        primitives.broadcast(choice, model, source)
        tokens = torch.cat([tokens, choice])
    trainer.stage.train()
    return tokens.cpu()


def _whole(columns: Tensor, group: primitives.Group, vocab: int) -> Tensor:
    """All logits from each rank's columns (v,); ranks hold ceil(V / n) columns while they last."""
    width = -(-vocab // group.size())
    padded = F.pad(columns, (0, width - columns.shape[0]), value=float("-inf"))
    return primitives.all_gather(padded, group)[:vocab]
