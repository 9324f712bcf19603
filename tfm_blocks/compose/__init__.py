"""Compose conf/ and overrides into plain mappings. No other package imports hydra or omegaconf."""
