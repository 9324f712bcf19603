"""Ways out of tfm-blocks, and into it."""
