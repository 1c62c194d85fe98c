# SPDX-License-Identifier: Apache-2.0
"""The model as data: its layers and their branches, what each costs, and on which pipeline stage it lies."""
