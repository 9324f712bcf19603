"""Probe tasks: questions with exact answers, generated from a seed, that show what an architecture can compute.

`catalogue.TASKS` maps names to classes, and `catalogue.task` registers the tasks of plug-ins. A
`task.ProbeTask` is a frozen dataclass of settings. Its method `examples` generates the `task.Example`s of a split.
"""
