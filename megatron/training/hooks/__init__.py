"""Everything around the training step: logging, evaluation, checkpoints, reasons to stop. One file each."""
