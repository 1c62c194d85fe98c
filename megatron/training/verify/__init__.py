"""Checks of a run against another: parity of layouts."""
