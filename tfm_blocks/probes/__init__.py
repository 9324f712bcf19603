"""Probe tasks: questions with exact answers, generated from a seed, that show what an architecture can compute.

`catalogue.TASKS` maps names to classes. A `task.Task` is a frozen dataclass of settings, and `Task.examples` generates
the `example.Example`s of a split.
"""
