"""The run: order, logs, files."""
