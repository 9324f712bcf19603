"""Check a model mapping against the registry and return a spec, or a list of problems. Does not need torch or hydra."""
