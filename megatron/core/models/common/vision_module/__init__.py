# SPDX-License-Identifier: Apache-2.0
"""The base of models of images."""
