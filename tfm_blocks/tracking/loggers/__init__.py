"""The loggers of runs: each module has one logger and its settings, with defaults in conf/logger/NAME.yaml.

Settings are read without the libraries, so a module imports its library in the functions that use it.
"""
