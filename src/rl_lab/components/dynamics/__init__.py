"""Dynamics: what follows an action, known or learned."""
