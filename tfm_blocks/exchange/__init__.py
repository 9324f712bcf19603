"""Models of other libraries: import, export, and the tables that both read."""
