# SPDX-License-Identifier: Apache-2.0
"""Checks of a run against another: parity of layouts."""
