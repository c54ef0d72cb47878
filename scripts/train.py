"""`python scripts/train.py +experiment=dqn_cartpole` is `rl-lab train experiment=dqn_cartpole`."""

import sys

from rl_lab.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
