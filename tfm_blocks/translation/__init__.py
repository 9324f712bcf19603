"""A trained network and a tokenizer turn text into text."""
