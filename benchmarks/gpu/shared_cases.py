"""The cases of ranks that share a GPU: first the library itself, then the bodies of the tests.

One rule: what a layout must give is said once, by the test of it, which runs here on other ranks.
So a case of `TESTS` is a row of a test's own parametrisation, and passes as the test does.
"""

import importlib
import inspect
import math
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.gpu import shared_bodies as bodies
from benchmarks.gpu import shared_runs as runs
from benchmarks.gpu.memory_check import memory_checked
from benchmarks.gpu.rows import NotRun, expect
from benchmarks.gpu.shared_ranks import MOST, DeviceRanks
from torchdistpackage.comm.nccl_library import loaded_nccl
from torchdistpackage.environment.gpu_sharing import too_old
from torchdistpackage.harness.lint.linter import lint
from torchdistpackage.plan.run_plan import make_plan

TESTS = {
    "layout": "tests.train.test_parity:test_one_step_is_that_of_one_process",
    "zero": "tests.train.test_zero:test_two_steps_are_those_of_one_process",
    "schedule": "tests.train.test_parity:test_every_schedule_gives_the_step_of_one_process",
    "overlap": "tests.train.test_parity_overlap:test_an_overlapped_step_is_that_of_one_process",
    "context": "tests.train.test_parity:test_context_under_schedules_and_zero",
    "experts": "tests.train.test_experts:test_experts_train_as_in_one_process",
    "resume": "tests.train.test_train_state_elsewhere:"
    "test_state_is_the_same_to_the_bit_and_losses_go_on",
}
"""Kind -> the test whose cases, all in float64, they are."""
TOUR = (
    *("data4-tied", "pipe2-tied", "tensor2-sp", "context2-tied", "data2xtensor2-sp-tied"),
    *("data2xpipe2-tied", "pipe2xtensor2-sp-tied", "data2xpipe2xtensor2-sp-tied"),
)
"""Layouts that have each axis, two of them and three; tried in other types, and for their order."""
LORA = ("data2-zero3", "pipe2xtensor2", "tensor2-sequence")
BOUNDS = {"float32": 1e-5, "bf16": 0.05}
"""Largest distance of a gradient from that of one process in float64, in parts of the tensor's
largest element. bf16 keeps 8 bits, and a gradient is the sum of what a dozen matmuls round."""
LOSS_BOUNDS = {"float32": 1e-6, "bf16": 1e-3}
LEAST = 1e-3
"""A tensor whose gradient is far below the largest of all (the bias of keys, whose true gradient is
zero) is compared with this part of that."""


@dataclass(frozen=True)
class Case:
    """run: returns what to say, and raises where the case is wrong.

    limit_s: of each call on ranks, and of each command. is_base: what all others rest on.
    by_default: it is run on a CPU too.
    """

    name: str
    run: Callable[[DeviceRanks], str]
    limit_s: float = 60.0
    is_base: bool = False
    by_default: bool = False

    @property
    def kind(self) -> str:
        return self.name.partition(" ")[0]


def cases(*, on_gpu: bool) -> list[Case]:
    """All of them in the order in which they tell most: the library, one case of each kind, the
    small set of each test, all others, and one of each kind under memcheck."""
    small, others = _of_tests()
    small += [Case(f"lora {x}", partial(_lora, x)) for x in LORA]
    small += [
        *(Case(f"{dtype} {x}", partial(_in_type, dtype, x)) for dtype in BOUNDS for x in TOUR),
        *(Case(f"order {x}", partial(_order, x, on_gpu=on_gpu)) for x in TOUR),
        *(Case(f"run {x}", partial(run, on_gpu=on_gpu), 150.0) for x, run in runs.RUNS),
    ]
    firsts = {case.kind: case for case in reversed(small)}
    tour = [replace(case, by_default=True) for case in small if case in firsts.values()]
    rest = [case for case in small if case not in firsts.values()]
    checked = [case.name for case in tour if on_gpu and case.kind in (*TESTS, "lora")]
    checks = [Case(f"memcheck {x}", partial(memory_checked, x), 240.0) for x in checked]
    return [*_of_the_library(on_gpu=on_gpu), *tour, *rest, *others, *checks]


# -- the library ---------------------------------------------------------------------------


def _of_the_library(*, on_gpu: bool) -> Iterator[Case]:
    """In the order in which a failure explains the next one."""
    runs = {
        "version": partial(_version, on_gpu=on_gpu),
        **{f"{size} ranks": partial(_communication, size) for size in (2, 4, MOST)},
        "three communicators": _three_communicators,
    }
    for name, run in runs.items():
        yield Case(f"nccl {name}", run, is_base=True, by_default=True)


def _version(ranks: DeviceRanks, *, on_gpu: bool) -> str:
    if on_gpu and (problem := too_old(loaded_nccl(), 2)):
        raise ValueError(problem)
    (found,) = {*ranks(2).run(bodies.version)}
    expect(found.startswith("nccl") == on_gpu, f"the ranks run over {found}")
    return found


def _communication(size: int, ranks: DeviceRanks) -> str:
    (number,) = {*ranks(size).run(bodies.communication, ranks.limit_s / 2)}
    return f"{number} operations, and messages between all pairs, bring what was sent"


def _three_communicators(ranks: DeviceRanks) -> str:
    results = ranks(MOST).run(bodies.overlapping, (2, 2, 2))
    off, taken = max(x for x, _ in results), max(x for _, x in results)
    expect(off == 0, f"sums under way together are off by {off:g}")
    each_mib = taken / MOST / 2**20
    return f"sums of three groups under way together; {each_mib:.0f} MiB of a rank's for the groups"


# -- the bodies of tests -------------------------------------------------------------------


def _of_tests() -> tuple[list[Case], list[Case]]:
    """Those of the small set of each test, and all others."""
    small: list[Case] = []
    others: list[Case] = []
    for kind, path in TESTS.items():
        module, _, name = path.partition(":")
        test = getattr(importlib.import_module(module), name)
        rows = sorted(_rows(test), key=lambda row: _size(row[0]))
        for label, values, in_small_set in rows:
            case = Case(f"{kind} {label}", partial(_run_test, test, values))
            (small if in_small_set else others).append(case)
    return small, others


def _rows(test: Callable[..., object]) -> Iterator[tuple[str, Mapping[str, Any], bool]]:
    """(name, arguments, whether it is in the small set) of each case of a parametrised test."""
    (mark,) = (x for x in test.pytestmark if x.name == "parametrize")  # type: ignore[attr-defined]
    names, params = mark.args[0], mark.args[1]
    names = [x.strip() for x in names.split(",")] if isinstance(names, str) else [*names]
    for param in params:
        values = getattr(param, "values", None) if hasattr(param, "marks") else (param,)
        label = getattr(param, "id", None) or "-".join(map(_plain, values or ()))
        yield label, dict(zip(names, values or (), strict=True)), not getattr(param, "marks", ())


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return "x".join(f"{axis}{size}" for axis, size in value.items() if size != 1)
    return str(value)


def _size(label: str) -> int:
    """About how many ranks a case has, by its name: those of one size are kept."""
    sizes = re.findall(r"(?:data|pipe|tensor|context)(\d+)", label)
    return math.prod(map(int, sizes)) if sizes else MOST // 2


def _run_test(test: Callable[..., object], values: Mapping[str, Any], ranks: DeviceRanks) -> str:
    more: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        if "tmp_path" in inspect.signature(test).parameters:
            more["tmp_path"] = Path(folder)
        test(ranks, **values, **more)
    return "as one process, to 1e-9 in float64"


# -- other types, adapters, the order of calls ---------------------------------------------


def _layout(name: str) -> tuple[int, list[str], list[str]]:
    """(ranks, overrides, those of one process) of a row of the parity matrix."""
    from tests.train import test_parity

    degrees, sequence_parallel, tied = {x.id: x.values[0] for x in test_parity.cases()}[name]
    base = test_parity.overrides(degrees, tied)
    axes = [f"parallel.{axis}={size}" for axis, size in degrees.items()]
    axes.append(f"parallel.sequence_parallel={str(sequence_parallel).lower()}")
    return math.prod(degrees.values()), [*base, *axes], base


def _in_type(dtype: str, name: str, ranks: DeviceRanks) -> str:
    from tests.train import parity, test_parity

    size, mine, base = _layout(name)
    results = ranks(size).run(test_parity.one_step, [*mine, f"precision.dtype={dtype}"])
    ((true, true_loss, _),) = test_parity.one_process(ranks, base)
    held = parity.whole([x for x, _, _ in results], rtol=BOUNDS[dtype], atol=math.inf)
    off = distance(held, parity.whole([true]))
    loss_off = max(abs(loss / true_loss - 1) for _, loss, _ in results)
    text = f"gradients off by {off:.1e} of one process in float64, the loss by {loss_off:.1e}"
    expect(off < BOUNDS[dtype] and loss_off < LOSS_BOUNDS[dtype], text)
    return text


def distance(mine: Mapping[str, Tensor], true: Mapping[str, Tensor]) -> float:
    """Largest difference of an element, in parts of the largest one of its tensor."""
    least = LEAST * max(float(x.abs().max()) for x in true.values())
    return max(
        float((mine[name].double() - x).abs().max()) / max(float(x.abs().max()), least)
        for name, x in true.items()
    )


def _lora(name: str, ranks: DeviceRanks) -> str:
    if find_spec("transformers") is None:
        raise NotRun("transformers is not installed")
    from tests.train import test_lora, test_transformers
    from tests.train.lora_ranks import lora_steps
    from tests.train.transformers_ranks import save_model

    size, changes = test_transformers.asked(test_transformers.LAYOUTS[name])
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/model"
        ranks(1).run(save_model, test_transformers.MODELS["llama"], path)
        base = [f"model.hf={path}", *test_lora.changes_of("llama")]
        (truth,) = ranks(1).run(lora_steps, base)
        test_transformers.expect_same(ranks(size).run(lora_steps, [*base, *changes]), truth)
    return "three steps of adapters as in one process, to 1e-9 in float64"


Call = bodies.RecordedCall


def _order(name: str, ranks: DeviceRanks, *, on_gpu: bool) -> str:
    """The calls of each rank beside those that the linter has of the same steps."""
    from tests.train import parity

    size, changes, _ = _layout(name)
    real = ranks(size).run(bodies.recorded, changes)
    plan = make_plan(parity.config(changes), size)
    report = lint(lambda rank: bodies.steps(changes), plan.topology, queued=on_gpu).check()
    linted = [[_linted(*call) for call in calls] for calls in report.calls]
    for rank, (mine, theirs) in enumerate(zip(real, linted, strict=True)):
        pairs = enumerate(zip_longest(_collectives(mine), _collectives(theirs)), 1)
        number, (a, b) = next(((n, p) for n, p in pairs if p[0] != p[1]), (0, (None, None)))
        expect(not number, f"rank {rank}, collective {number}: {a} on the device, {b} by lint")
        expect(_messages(mine) == _messages(theirs), f"rank {rank} has other messages than by lint")
    number, messages = len(_collectives(real[0])), sum(map(len, _messages(real[0]).values()))
    return f"{number} collectives and {messages} messages of rank 0 in the order of tdp comm lint"


def _linted(ranks: tuple[int, ...], signature: Any, peer: int | None) -> Call:
    facts = dict(signature.facts)
    shape = facts.get("shape", ())
    num = facts["elements"] if "elements" in facts else math.prod(shape) if peer is None else 0
    return ranks, signature.operation, facts.get("dtype", ""), num, peer


def _is_of_a_step(call: Call) -> bool:
    """Whether a call is one that the linter sees as the recorder does.

    Left out are exchanges of objects and sizes, which threads make in another way, and the calls
    with which NCCL connects a group, of one number in float32, of which the recorder takes no note.
    """
    _, operation, dtype, num, _ = call
    of_objects = operation.endswith(("object", "objects"))
    of_sizes = operation == "all_gather" and dtype in ("int64", "uint8")
    return not (of_objects or of_sizes or (dtype, num) == ("float32", 1))


def _collectives(calls: Sequence[Call]) -> list[tuple[tuple[int, ...], str, str]]:
    """Their order over all groups."""
    return [call[:3] for call in calls if call[4] is None and _is_of_a_step(call)]


def _messages(calls: Sequence[Call]) -> dict[tuple[object, ...], list[tuple[str, int]]]:
    """Type and elements of the messages of each group and peer, each way in their order."""
    found: dict[tuple[object, ...], list[tuple[str, int]]] = {}
    for ranks, operation, dtype, num, peer in calls:
        if peer is not None and _is_of_a_step((ranks, operation, dtype, num, peer)):
            found.setdefault((ranks, operation, peer), []).append((dtype, num))
    return found
