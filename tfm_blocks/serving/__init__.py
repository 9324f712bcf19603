"""Serve a trained run over HTTP: requests, their common batches, and the limits of the server."""
