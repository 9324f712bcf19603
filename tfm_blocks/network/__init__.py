"""Turn a checked spec into an `nn.Module`: plain modules at their addresses and an ordered list of calls."""
