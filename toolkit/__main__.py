"""`python -m toolkit`: the shell, also where its script is not installed or a launcher asks for a module."""

import sys

from toolkit.cli import main

if __name__ == "__main__":
    sys.exit(main())
