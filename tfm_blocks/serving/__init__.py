"""Serve a trained run over HTTP: requests, batches of concurrent requests, and limits."""
