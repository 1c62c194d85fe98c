"""Batches for training: samplers and loaders, and batches planned for dynamic context parallelism."""
