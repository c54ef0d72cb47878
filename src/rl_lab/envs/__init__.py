"""The worlds: Gymnasium vector environments and small adapters."""
