"""The contract of a block, as checks that run: what it declares is what it does."""
