"""The parts: modules and pure functions; no environments, no loops, no files."""
