"""`python -m tightfit` is the same as `tightfit`."""

import sys

from tightfit.cli import main

if __name__ == "__main__":
    sys.exit(main())
