"""The one place that turns conf/ and overrides into plain mappings; hydra and omegaconf stay behind this door."""
