"""Sweeps: the jobs of one command, the processes that train them, and their results."""
