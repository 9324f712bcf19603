"""The cost of a training step on an accelerator, computed without one."""
