# SPDX-License-Identifier: Apache-2.0
"""What is particular to a kind of model: how it is built, its data, its forward step."""
