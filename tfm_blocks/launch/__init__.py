"""One run from its config to its finished folder: checks, processes, loggers, and the final scores."""
