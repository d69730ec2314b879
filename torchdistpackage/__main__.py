"""`python -m torchdistpackage` is `tdp`."""

import sys

from torchdistpackage.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
