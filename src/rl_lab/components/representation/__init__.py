"""Encoders and heads: from observations to features and back."""
