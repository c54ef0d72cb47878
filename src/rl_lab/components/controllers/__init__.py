"""Things that act or judge: actors, critics, the random policy."""
