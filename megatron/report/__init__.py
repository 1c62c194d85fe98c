# SPDX-License-Identifier: Apache-2.0
"""A page about a run: what its files hold, where its time goes, and how that looks."""
