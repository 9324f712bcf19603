"""Trains one run, or with -m one for each point of a sweep: python train.py model=base heads=8 layers=6."""

import sys

from tfm_blocks.cli.train import train

if __name__ == "__main__":
    sys.exit(train(sys.argv[1:], program="python train.py", command=[sys.executable, __file__]))
