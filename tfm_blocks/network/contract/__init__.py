"""Checks that a block behaves as its declaration states."""
