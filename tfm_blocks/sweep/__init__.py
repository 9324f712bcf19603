"""Many jobs from one command: which there are, the processes that train them, and what became of each."""
