"""`python -m tfm_blocks` is the command `tfm`."""

from tfm_blocks.cli import main

if __name__ == "__main__":
    main()
