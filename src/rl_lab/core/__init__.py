"""The vocabulary of RL Lab: types that both sides of a seam agree on. Imports torch and numpy, nothing of ours."""
