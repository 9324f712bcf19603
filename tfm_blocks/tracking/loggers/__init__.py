"""The loggers that a run can have: each module is one, with its settings, and conf/logger/NAME.yaml has its defaults.

Settings are read without the libraries, so a module imports its library in the functions that use it.
"""
