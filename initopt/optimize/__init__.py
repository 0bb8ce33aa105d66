"""What `python -m initopt.run --optimize` applies to a script that knows nothing of it: one file per optimization."""
