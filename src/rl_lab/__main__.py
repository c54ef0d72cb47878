"""`python -m rl_lab` is `rl-lab`."""

import sys

from rl_lab.cli import main

if __name__ == "__main__":
    sys.exit(main())
