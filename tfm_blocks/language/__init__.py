"""A mapping and the registry become a checked spec, or a list of what is wrong. Nothing here needs torch or hydra."""
