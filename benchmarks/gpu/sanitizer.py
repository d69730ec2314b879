"""Races between streams: torch's sanitizer, and collectives and copies that come late.

The sanitizer sees kernels and events, and takes a collective of NCCL for a kernel of the
current stream. So cases with several streams run as one of four on a back end whose calls are
kernels on a stream of the group (mirror.py), where the sanitizer sees both sides. It does not
see host memory: there late and early calls must give the same bits.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.cuda._sanitizer import CUDASanitizerErrors

from benchmarks.gpu.here import Here
from benchmarks.gpu.mirror import late, world
from benchmarks.gpu.models import CONFIGS, ONE_RANK
from benchmarks.gpu.rows import Found
from benchmarks.gpu.sides import CAP_MB, WIDTH, adamw, inputs
from benchmarks.gpu.sides import model as small_model
from torchdistpackage.comm import primitives
from torchdistpackage.comm.runtime import find_free_port
from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer

ROOT = CONFIGS.parent
EXAMPLES = {
    "own_loop_ddp": "",
    "zero": "",
    "sharded_ema": "",
    "own_loop_pipeline": "",
    "tensor_parallel_block": "",
    "fully_shard_offload": "",
    "two_tower": "three stages, and this part has one rank",
    "encoder_decoder": "four stages, and this part has one rank",
    "topology": "four ranks at least, and this part has one",
}
"""With why it cannot be shrunk to one rank."""
SHRUNK = [
    *ONE_RANK,
    "train.steps=3",
    "optim.warmup_steps=1",
    "train.eval_every=0",
    "train.eval_batches=1",
    "train.generate_tokens=0",
    "train.check_replicas_every=0",
    "checkpoint.save_every=0",
    "checkpoint.save_every_min=null",
    "model.layers=2",
    "data.global_batch=4",
    "log.plot=false",
    "launch.local.procs=1",
]
AT_ONCE, LIMIT_S = 4, 100
SEVERAL, STEPS = 4, 6
LATE_S = 0.02
"""Far longer than what it is to come after."""
STAND_IN = Path(__file__).parent / "stand_in"
"""Digits drawn at random, for a machine without scikit-learn."""


def measure(here: Here, found: Found) -> None:
    with tempfile.TemporaryDirectory() as folder:
        _programs(here, found, Path(folder))
    with found.case("a planted race"):
        _planted(here, found)
    for name, run in {**OWN_STREAMS, **LATE}.items():
        with found.case(name):
            _compare(here, found, name, run)


# -- examples and configs, each a process -------------------------------------------------


def _programs(here: Here, found: Found, folder: Path) -> None:
    examples = [name for name, why in EXAMPLES.items() if not why]
    configs = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
    commands = {f"example {x}": [str(ROOT / f"examples/{x}.py")] for x in examples}
    commands |= {f"config {x}": _train(x, folder) for x in configs}
    offloaded = ["train.recompute=offload", "run.name=offload"]
    commands["activations in host memory"] = [*_train("gpt_tiny", folder), *offloaded]
    if here.small:
        commands = {name: commands[name] for name in ("example zero", "config gpt_tiny")}
    with ThreadPoolExecutor(1 if here.small else AT_ONCE) as pool:
        ended = dict(zip(commands, pool.map(partial(_run, folder), commands.values()), strict=True))
    for name, (code, text) in ended.items():
        said = "no race was seen" if code == 0 else _what(text)
        found.judge(name, code == 0, "it ran" if here.small and code == 0 else said)
    for name, why in EXAMPLES.items():
        if why:
            found.leave(f"example {name}", why)


def _train(config: str, folder: Path) -> list[str]:
    path = str(CONFIGS / f"{config}.yaml")
    changes = [*SHRUNK, f"run.dir={folder}", f"data.path={ROOT / 'docs/config.md'}"]
    if config != "gpt_text":
        changes.pop()
    if config.startswith("moe"):
        changes.append("parallel.expert=1")
    return ["-m", "torchdistpackage", "train", path, *changes]


def _run(folder: Path, command: list[str]) -> tuple[int, str]:
    """As a rank of a world of one that a launcher started."""
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": find_free_port()}
    path = [os.environ.get("PYTHONPATH", str(ROOT))]
    if find_spec("sklearn") is None:
        path.append(str(STAND_IN))
    env = {**os.environ, **place, "PYTHONPATH": os.pathsep.join(path)}
    try:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=folder,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        said = error.stdout or b""
        return 1, f"{said.decode(errors='replace')}\nnot done after {LIMIT_S} s"
    return done.returncode, done.stdout


def _what(text: str) -> str:
    """The sanitizer's own words if it spoke, else the last line; all of it goes to the log."""
    sys.stderr.write(text)
    lines = [line for line in text.splitlines() if line.strip()] or ["no word"]
    return next((line for line in lines if "possible data race" in line), lines[-1]).strip()


# -- as one of several, early and late ----------------------------------------------------


def _planted(here: Here, found: Found) -> None:
    """What reads a sum that nobody has waited for must be seen, or the rows below say nothing."""
    if here.small:
        found.leave("a planted race", "nothing is late here")
        return
    with world(here, SEVERAL), late():
        x = torch.ones(WIDTH, device=here.device)
        pending = primitives.start_all_reduce(x, torch.distributed.group.WORLD)
        try:
            read = x * 1
        except CUDASanitizerErrors:
            found.judge("a planted race", True, "the sanitizer saw it")
        else:
            here.sync()
            late_seen = bool(read.isnan().any())
            text = "the sanitizer is silent; the late sum was read too early"
            found.judge("a planted race", False, text, late_seen=int(late_seen))
        pending.wait()


def _compare(here: Here, found: Found, name: str, run: "Run") -> None:
    """The same steps twice: the second time collectives, copies and one stream come late."""
    with world(here, SEVERAL):
        early = run(here, lambda: None)
    with world(here, SEVERAL), late():
        after = run(here, lambda: here.sleep(LATE_S))
    off = max(float((a - b).abs().max()) for a, b in zip(early, after, strict=True))
    same = all(torch.equal(a, b) for a, b in zip(early, after, strict=True))
    if not same:
        found.judge(name, False, f"late, parameters are off by {off:g}", off=off)
    elif here.small:
        found.show(name, "it ran; nothing is late here")
    else:
        found.judge(name, True, "no race was seen, and late gives the same bits")


def _trained(here: Here, pause: "Pause", build: "Build") -> list[Tensor]:
    """Parameters after steps, during which the optimizer's state of a step before is loaded."""
    net, optimizer = build(small_model(here))
    x = inputs(here)
    for step in range(STEPS):
        net(x).square().mean().backward()
        if step == STEPS - 3:
            kept = optimizer.state_dict()
        pause()  # what goes back to the device is late, and the host goes on
        optimizer.step()
        optimizer.zero_grad()
        if step == STEPS - 2:
            optimizer.load_state_dict(kept)
    return _whole(here, net, optimizer)


class _Slow(torch.autograd.Function):
    """Its backward keeps the stream that it is on busy first."""

    @staticmethod
    def forward(ctx, x: Tensor, pause: "Pause") -> Tensor:
        ctx.pause = pause
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        ctx.pause()
        return grad, None


class TwoStreams(nn.Module):
    """Each half of the forward on a stream of its own; autograd runs the backward on the same."""

    def __init__(self, here: Here, pause: "Pause") -> None:
        super().__init__()
        self.halves = nn.ModuleList(small_model(here) for _ in range(2))
        self._streams = [None if here.small else torch.cuda.Stream() for _ in self.halves]
        self._pauses = (pause, lambda: None)

    def forward(self, x: Tensor) -> Tensor:
        outputs = []
        for half, stream, pause in zip(self.halves, self._streams, self._pauses, strict=True):
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                outputs.append(_Slow.apply(half(x), pause))
        for stream, output in zip(self._streams, outputs, strict=True):
            if stream is not None:
                torch.cuda.current_stream().wait_stream(stream)
                output.record_stream(torch.cuda.current_stream())
        return outputs[0] + outputs[1]


def _two_streams(here: Here, pause: "Pause", build: "Build") -> list[Tensor]:
    net, optimizer = build(TwoStreams(here, pause))
    x = inputs(here)
    for _ in range(STEPS):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
    return _whole(here, net, optimizer)


def _second_reader(here: Here, pause: "Pause", build: "Build") -> list[Tensor]:
    """A stream that follows the main one reads parameters first, then the main one does."""
    net, optimizer = build(small_model(here))
    side = None if here.small else torch.cuda.Stream()
    x = inputs(here)
    for _ in range(STEPS):
        loss = net(x).square().mean()
        if side is not None:  # what it reads is written next; the forward did not wait for it
            torch.cuda.current_stream().wait_stream(side)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if side is not None:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            averages = [p.detach() * 0.5 for p in net.parameters()]
        del averages
    return _whole(here, net, optimizer)


def _whole(here: Here, net: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    getattr(optimizer, "finish", lambda: None)()
    here.sync()
    return [p.detach().clone() for p in net.parameters()]


def _naive(net: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    wrapped = NaiveDDP(net, bucket_cap_mb=CAP_MB)
    return wrapped, adamw(wrapped)


def _zero(stage: int, **options: object) -> "Build":
    def build(net: nn.Module) -> tuple[nn.Module, ZeroOptimizer]:
        return net, ZeroOptimizer(adamw(net), net, stage=stage, bucket_cap_mb=CAP_MB, **options)

    return build


Pause = Callable[[], object]
Build = Callable[[nn.Module], tuple[nn.Module, torch.optim.Optimizer]]
Run = Callable[[Here, Pause], list[Tensor]]
OWN_STREAMS: dict[str, Run] = {
    "NaiveDDP, a forward on two streams": partial(_two_streams, build=_naive),
    "ZeRO 1, a forward on two streams": partial(_two_streams, build=_zero(1)),
    "ZeRO 2, a forward on two streams": partial(_two_streams, build=_zero(2)),
    "ZeRO 1, a second stream reads first": partial(_second_reader, build=_zero(1)),
}
LATE: dict[str, Run] = {
    "NaiveDDP": partial(_trained, build=_naive),
    "ZeRO 1": partial(_trained, build=_zero(1)),
    "ZeRO 2": partial(_trained, build=_zero(2)),
    "ZeRO 3": partial(_trained, build=_zero(3)),
    "ZeRO 1 with offload": partial(_trained, build=_zero(1, offload=True)),
    "ZeRO 3 with offload": partial(_trained, build=_zero(3, offload=True)),
}
