"""The closed registry: what a block is, what it takes, and what its YAML values may say. Nothing here needs torch."""
