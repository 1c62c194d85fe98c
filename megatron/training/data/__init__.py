# SPDX-License-Identifier: Apache-2.0
"""Batches for training: samplers and loaders, and batches planned for dynamic context parallelism."""
