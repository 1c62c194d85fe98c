"""Checkpoints of a run: saving and loading them, how their settings differ from the run's, and trained models."""
