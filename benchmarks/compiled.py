"""The table of docs/compile.md: every parallel module under torch.compile, on two ranks over gloo.

    python -m benchmarks.compiled                       every case, aot_eager
    python -m benchmarks.compiled --backend inductor --missing
    python -m benchmarks.compiled --backend inductor --shapes 1 GPTBlock RMSNorm
    python -m benchmarks.compiled --page                write docs/compile.md from what was found

Counted and compared, not timed: graph breaks, recompiles over the shapes, and the largest
difference from eager code in float64, forward and of all gradients. Each case is kept when it is
done.
"""

import argparse
import json
from pathlib import Path

from tests.parallel.tensor.compiled_cases import CASES, compared
from torchdistpackage.testing import RankPool

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "compiled.json"
PAGE = ROOT / "docs" / "compile.md"
MARKER = "<!-- python -m benchmarks.compiled --page writes everything below this line -->\n"
RANKS, LIMIT_S = 2, 900.0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", default=[], metavar="CASE")
    parser.add_argument("--backend", default="aot_eager")
    parser.add_argument("--shapes", type=int, default=3)
    parser.add_argument("--missing", action="store_true", help="cases that have no such row")
    parser.add_argument("--page", action="store_true")
    options = parser.parse_args()
    if options.page:
        head = PAGE.read_text(encoding="utf-8").partition(MARKER)[0]
        PAGE.write_text(head + MARKER + table(), encoding="utf-8")
        return
    with RankPool(preload=("torch._inductor.compile_fx",)) as pool:
        for name in options.names or CASES:
            row = known().get(name, {}).get(options.backend)
            if options.missing and row is not None and row["shapes"] >= options.shapes:
                continue
            how = name, options.backend, options.shapes
            found = pool(RANKS).run(compared, *how, timeout_s=LIMIT_S)
            keep(name, options.backend, options.shapes, [max(x) for x in zip(*found, strict=True)])


def keep(name: str, backend: str, num_shapes: int, found: list[float]) -> None:
    breaks, recompiles, forward, backward = found
    rows = known()
    rows.setdefault(name, {})[backend] = {
        "shapes": num_shapes,
        "graph_breaks": breaks,
        "recompiles": recompiles,
        "forward": forward,
        "backward": backward,
    }
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"{name}, {backend}: {found}", flush=True)


def known() -> dict[str, dict[str, dict[str, float]]]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def table() -> str:
    heads = "shapes | graph breaks | recompiles | difference forward | of gradients"
    lines = [f"\n| module | compiler | {heads} |", "|---|---|---|---|---|---|---|"]
    for name, by in known().items():
        for backend, found in by.items():
            numbers = (f"{found[key]:.0f}" for key in ("shapes", "graph_breaks", "recompiles"))
            apart = (f"{found[key]:.1e}" if found[key] else "0" for key in ("forward", "backward"))
            lines.append(f"| {name} | {backend} | {' | '.join((*numbers, *apart))} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
