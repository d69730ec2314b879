"""Write the tables of docs/predicted_steps.md from torchdistpackage/predict.

scripts/docs             write what follows the marker, with the tables of docs/config.md
scripts/docs --check     exit code 1 if it is out of date
scripts/prediction_table.py --fit h100-sxm    print the constants that its rows ask for
"""

import sys
from pathlib import Path

from torchdistpackage.predict.devices import find_device
from torchdistpackage.predict.error_table import table
from torchdistpackage.predict.fitting import fit

PAGE = Path(__file__).resolve().parents[1] / "docs" / "predicted_steps.md"
MARKER = "<!-- scripts/docs writes everything below this line -->\n"


def main() -> int:
    if sys.argv[1:2] == ["--fit"]:
        constants, error = fit(find_device(sys.argv[2]))
        sys.stdout.write(f"{constants}, root of the mean squared error {error**0.5:.1%}\n")
        return 0
    text = PAGE.read_text(encoding="utf-8")
    fresh = f"{text.partition(MARKER)[0]}{MARKER}\n{table()}"
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(fresh, encoding="utf-8")
        return 0
    if fresh != text:
        sys.stderr.write(f"{PAGE} is out of date; run scripts/docs\n")
    return int(fresh != text)


if __name__ == "__main__":
    sys.exit(main())
