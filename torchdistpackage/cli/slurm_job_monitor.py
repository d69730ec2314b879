"""`python -m torchdistpackage.tools.slurm_job_monitor --cfg FILE`: as the earlier package had it.

One rule: it is `tdp jobs monitor FILE` under an older name.
"""

import argparse
import sys

from torchdistpackage.cli.main import main


def command(argv: list[str]) -> list[str]:
    """The arguments of `tdp` for those of the earlier program."""
    parser = argparse.ArgumentParser(
        prog="slurm_job_monitor", description="Submit a batch script and keep it going."
    )
    parser.add_argument("--cfg", required=True, metavar="FILE", help="batch script")
    return ["jobs", "monitor", parser.parse_args(argv).cfg]


if __name__ == "__main__":
    sys.exit(main(command(sys.argv[1:])))
