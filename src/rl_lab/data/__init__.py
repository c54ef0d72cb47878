"""The stream: environment steps in, batches out."""
