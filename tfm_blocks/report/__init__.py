"""Tables, pages and pictures of models and runs."""
