"""The run folder: plain files that nothing in is imported, evaluated or unpickled from."""
