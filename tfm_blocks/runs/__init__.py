"""The run folder: plain files. Reading them never imports, evaluates or unpickles code."""
