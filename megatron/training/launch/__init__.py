# SPDX-License-Identifier: Apache-2.0
"""Starting: the job's processes, their rendezvous, and this process's place among them."""
