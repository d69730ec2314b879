"""The GPU benchmarks, small on the CPU: they run and say so; a part that fails takes no other.

No torch.
"""

import json
import re
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu.kernel_classes import class_of, times_by_class
from benchmarks.gpu.parts import PARTS, Part
from benchmarks.gpu.rows import Found, Status, status_of, table
from benchmarks.gpu.summary import RESULTS

PAGE = command.ROOT / "benchmarks" / "gpu" / "README.md"


def results(out: Path) -> dict:
    return json.loads((out / "results.json").read_text())["parts"]


def run(out: Path, *parts: str) -> int:
    return command.main(["--cpu", "--out", str(out), "--only", ",".join(parts)])


@pytest.mark.full
def test_a_part_that_dies_keeps_its_rows_and_takes_no_other(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(PARTS, "dies", Part("tests.docs.failing_part", "nothing", 60))
    assert run(tmp_path, "dies", "memory") == 1
    dies, memory = results(tmp_path).values()
    assert dies["status"] == Status.FAILED and "ended with 7" in dies["why"]
    assert "its last word" in dies["tail"]
    statuses = {row["name"]: row["status"] for row in dies["rows"]}
    expected = {"shown": "shown", "holds": "ok", "slow": "shown", "raises": "failed"}
    assert statuses == {**expected, "left out": "not run"}
    assert "ValueError: of this case" in dies["rows"][3]["text"]
    assert memory["status"] == Status.OK
    plain = memory["rows"][0]["numbers"]
    assert plain["held_bytes"] == pytest.approx(plain["planned_bytes"], rel=1e-3)
    shown = (tmp_path / "table.txt").read_text()
    assert shown == capsys.readouterr().out
    assert shown.startswith("cpu, small: shows only that the script runs")
    assert re.search(r"memory: ok in \d+ s, cpu, small\n", shown)


@pytest.mark.full
def test_a_part_that_hangs_is_ended_and_keeps_its_rows(tmp_path, monkeypatch):
    monkeypatch.setitem(PARTS, "hangs", Part("tests.docs.hanging_part", "nothing", 20))
    assert run(tmp_path, "hangs") == 1
    hangs = results(tmp_path)["hangs"]
    assert hangs["status"] == Status.FAILED and "not done after 20 s" in hangs["why"]
    assert [row["name"] for row in hangs["rows"]] == ["before"]


@pytest.mark.full
@pytest.mark.parametrize("part", [name for name in PARTS if name != "memory"])
def test_every_part_runs_small_on_the_cpu(part, tmp_path):
    assert run(tmp_path, part) == 0, (tmp_path / "table.txt").read_text()
    found = results(tmp_path)[part]
    assert found["machine"]["device"] == "cpu"
    assert {row["status"] for row in found["rows"]} <= {"ok", "shown", "not run"}


KERNELS = {
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL": "communication",
    "void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 64>>": "attention",
    "fmha_cutlassB_bf16_aligned_64x64_k64_sm80": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16": "attention",
    "nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNN": "matmul",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64": "matmul",
    "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>": "optimizer",
    "Memcpy DtoD (Device -> Device)": "copy",
    "triton_red_fused__to_copy_mean_mul_pow_rsqrt_0": "norm/elementwise",
    "triton_poi_fused_mul_silu_1": "norm/elementwise",
    "void at::native::vectorized_elementwise_kernel<4, AddFunctor>": "norm/elementwise",
    "aten::mm": "matmul",
}


def test_kernels_have_classes_and_idle_is_between_them():
    assert {name: class_of(name) for name in KERNELS} == KERNELS
    times = times_by_class([("aten::mm", 8, 9), ("ncclX", 1, 5), ("aten::mm", 2, 4), ("add", 6, 7)])
    assert times == {"communication": 4, "matmul": 3, "norm/elementwise": 1, "idle": 2}
    assert [*times] == ["communication", "matmul", "norm/elementwise", "idle"]


def test_without_time_left_a_part_is_not_run(tmp_path):
    part = command.run("memory", PARTS["memory"], tmp_path, 0.0, on_gpu=False)
    assert part["status"] == Status.NOT_RUN and "--only memory" in part["why"]


def test_a_time_is_judged_on_a_device_alone():
    def of(*, small: bool, holds: bool) -> Status:
        found = Found(lambda rows: None, small=small)
        found.judge_time("a step", holds, "1.02 of the bare one", ratio=1.02)
        return found.rows[0].status

    assert of(small=True, holds=False) == of(small=True, holds=True) == Status.SHOWN
    assert of(small=False, holds=False) == Status.FAILED
    assert of(small=False, holds=True) == Status.OK


def test_a_part_is_what_its_rows_are():
    def of(*statuses: Status) -> Status:
        return status_of([{"status": status} for status in statuses])

    assert of(Status.OK, Status.FAILED, Status.NOT_RUN) == Status.FAILED
    assert of(Status.SHOWN, Status.NOT_RUN) == Status.OK
    assert of(Status.NOT_RUN) == of() == Status.NOT_RUN


def test_the_table_says_where_and_what():
    rows = [{"status": "ok", "name": "ZeRO 1", "text": "1.003 of the bare one"}]
    part = {"status": "ok", "seconds": 3.0, "rows": rows, "machine": {"device": "a GPU"}}
    assert [*table("overhead", part)] == [
        "\noverhead: ok in 3 s",
        f"  {'ok':8} {'ZeRO 1':44} 1.003 of the bare one",
    ]


def test_a_part_is_a_world_of_one_whatever_started_the_benchmark(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "TDP_STORE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "3")
    found = command.environment(PARTS["sanitizer"], on_gpu=True)
    assert not {"RANK", "WORLD_SIZE", "SLURM_PROCID", "TDP_STORE", "TORCHELASTIC_RUN_ID"} & {*found}
    assert found["TORCH_CUDA_SANITIZER"] == "1"
    on_cpu = command.environment(PARTS["sanitizer"], on_gpu=False)
    assert on_cpu["CUDA_VISIBLE_DEVICES"] == "" and "TORCH_CUDA_SANITIZER" not in on_cpu


def test_a_part_of_no_name_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["--only", "memory,speed"])
    assert ended.value.code == 2 and "'speed'" in capsys.readouterr().err


def test_the_page_has_every_part():
    page = PAGE.read_text(encoding="utf-8")
    assert [name for name in PARTS if f"| `{name}` |" not in page] == []


def test_pages_cite_the_results_of_the_h100():
    """README's table is compared in test_readme.py."""
    known, docs = json.loads(RESULTS.read_text()), command.ROOT / "docs"
    record = RESULTS.with_suffix(".md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", record, re.M))
    for size, ratio in known["over_bare_loop"].items():
        assert re.search(rf"{size} {ratio} ", rows["step_time"]), size
    for size, ratio in known["compiled_over_eager"].items():
        assert re.search(rf"{size} [^,]*\({ratio}\)", rows["compile"]), size
    for name, ratio in known["over_bare_step"].items():
        assert f"{name} {ratio}" in rows["overhead"], name
    first, second = known["compiled_before_first_step_s"].values()
    assert f"{first} s before the first step, {second} s at the second start" in rows["compile"]
    compiled = (docs / "compile.md").read_text()
    assert re.findall(r"([\d.]+) s before the first step", compiled) == [str(first), str(second)]
    assert f"takes {known['compiled_over_eager']['124M']} of the time of an eager one" in compiled
