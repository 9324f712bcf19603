"""One run from a config to its end: what is checked before it, the processes that train it, and how it is stopped."""
