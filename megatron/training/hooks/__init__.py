# SPDX-License-Identifier: Apache-2.0
"""Everything around the training step: logging, evaluation, checkpoints, reasons to stop. One file each."""
