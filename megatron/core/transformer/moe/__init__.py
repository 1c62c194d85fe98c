# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: a router gives each token to a few of many MLPs (Shazeer et al., 2017; Fedus et al., 2021)."""
