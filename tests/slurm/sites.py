"""Thirty-six ways in which Slurm sites are odd, and what this package does at each: the table that
test_sites.py is held to, its stored result, and the page docs/sites.md.

    python -m tests.slurm.sites          writes the page from the table and the stored result

A row says beforehand which it will be. WORKS: the same YAML file, or the batch script, runs without
an edit of Python; `launch.site` names what `tdp site` wrote. SAYS: `tdp submit` stops on the login
node and prints YAML, with which the same run then works.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "sites.md"
RESULT = ROOT / "benchmarks" / "results" / "sites.json"
WORKS, SAYS = "works", "says what to write"


@dataclass(frozen=True)
class Oddity:
    """One odd thing of sites.

    how: what makes it work, or what is printed. simulated: how the test cluster is made to be so,
    with the stand-ins named.
    """

    number: int
    name: str
    verdict: str
    how: str
    simulated: str


_TABLE = Path(__file__).with_suffix(".yaml")
SITES = tuple(Oddity(**row) for row in yaml.safe_load(_TABLE.read_text()))


def stored() -> dict[str, str]:
    """Number of a site -> what the last recorded run of test_sites.py found."""
    return json.loads(RESULT.read_text())["sites"] if RESULT.exists() else {}


def page() -> str:
    """Return docs/sites.md."""
    result = json.loads(RESULT.read_text()) if RESULT.exists() else {"sites": {}, "slurm": "?"}
    sites = result["sites"]
    lines = [_HEAD]
    lines.append(
        "| | the site has | | how, or what is printed | simulated by |\n|---|---|---|---|---|"
    )
    for site in SITES:
        found = sites.get(str(site.number), "not tested")
        shown = found if found == site.verdict else f"**{found}** (stated: {site.verdict})"
        lines.append(f"| {site.number} | {site.name} | {shown} | {site.how} | {site.simulated} |")
    working = sum(sites.get(str(x.number)) == WORKS for x in SITES)
    saying = sum(sites.get(str(x.number)) == SAYS for x in SITES)
    lines.append(
        f"\nOf {len(SITES)}, {working} work and {saying} say what to write, on Slurm "
        f"{result['slurm']}. `tests/slurm/test_sites.py` (`./scripts/test --slurm --full`) makes a "
        f"test cluster of several nodes odd in each way; `python -m tests.slurm.sites` writes this "
        f"page from its table and stored result."
    )
    return "\n".join(lines) + "\n"


_HEAD = """# Odd Slurm sites

```sh
tdp site                # on a login node, once: asks Slurm, writes site.yaml, submits nothing
tdp site --probe        # and runs a job of some seconds that looks at a node
```

`tdp site` asks `sinfo`, `scontrol` and `sacctmgr` for partitions, limits, GRES, accounts and QOS.
What a site demands or forbids it finds with `sbatch --test-only`, which passes the site's submit
plugin and queues nothing. Name the file in the YAML file of a run:

```yaml
launch:
  site: site.yaml
```

`tdp submit` then adds the options that the site demands and `launch.slurm` leaves out, leaves out
those that it forbids, and asks for GPUs in the site's words. Each change is a note on the terminal.
What would change the run, such as a shorter time, is an error that prints the YAML to write. The
file is plain YAML; values may be changed by hand. For a script of your own, `tdp site` prints the
options with which to call `sbatch scripts/sbatch_example.sh`.

"""


def main() -> int:
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
