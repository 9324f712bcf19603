"""The closed registry of blocks, their arguments and the types of YAML values. Does not need torch."""
