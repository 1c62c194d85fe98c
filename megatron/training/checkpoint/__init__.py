# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run: saving and loading them, how their settings differ from the run's, and trained models."""
