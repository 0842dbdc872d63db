"""`python -m toolkit`: the shell, for `torchrun --nproc-per-node 2 -m toolkit run STUDY`."""

import sys

from toolkit.cli import main

if __name__ == "__main__":
    sys.exit(main())
